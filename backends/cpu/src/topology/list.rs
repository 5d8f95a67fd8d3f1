//! The kernel's lists of CPUs, such as `0-3,8,10-11`.

/// More CPUs than any kernel supports; a list that claims more is not believed.
const MOST_CPUS: usize = 1 << 16;

/// The numbers of a list, ascending, each once. What is not a number is left out.
pub(super) fn parse_list(text: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
            cpus.extend(first..=last.min(MOST_CPUS));
        }
    }
    cpus.sort_unstable();
    cpus.dedup();
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("\t5"), [5]);
        assert_eq!(parse_list(""), [0usize; 0]);
        assert_eq!(parse_list("7-3,x,2-"), [0usize; 0]);
        assert_eq!(parse_list("3,1-3"), [1, 2, 3]);
        assert_eq!(parse_list("0-99999999999").len(), MOST_CPUS + 1);
    }
}
