//! The date in a prompt: `strftime_now` of chat templates, in UTC.
//!
//! UTC, so that the prompt, and with it the answer, does not depend on where the machine stands.

use std::sync::Arc;

use minijinja::{Error, ErrorKind};

/// Gives seconds since 1970-01-01 00:00 UTC.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// The system's clock.
pub(super) fn system() -> Clock {
    Arc::new(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |time| i64::try_from(time.as_secs()).unwrap_or(i64::MAX))
    })
}

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a time as Python's `strftime` does; `%-d` and the like leave out leading zeros.
pub(super) fn format(seconds: i64, format: &str) -> Result<String, Error> {
    // Far outside these years nothing is a date that a prompt could mean.
    let seconds = seconds.clamp(0, 253_402_300_799);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let (year, month, day) = civil(days);
    let day_of_year = days - first_day(year) + 1;
    let weekday = DAYS[(days % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = rest.next();
        let padded = directive != Some('-');
        if !padded {
            directive = rest.next();
        }
        let mut number = |value: i64, width: usize| match padded {
            true => out.push_str(&format!("{value:0width$}")),
            false => out.push_str(&value.to_string()),
        };
        match directive {
            Some('d') => number(day, 2),
            Some('m') => number(month, 2),
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('H') => number(hour, 2),
            Some('I') => number((hour + 11) % 12 + 1, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second % 60, 2),
            Some('j') => number(day_of_year, 3),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('a') => out.push_str(&weekday[..3]),
            Some('A') => out.push_str(weekday),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('B') => out.push_str(month_name),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&format!("{year:04}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{:02}", second % 60)),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            other => {
                let name = other.map(String::from).unwrap_or_default();
                let text = format!("strftime_now: %{name} is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, text));
            }
        }
    }
    Ok(out)
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Days from 1970-01-01 to the first day of `year`.
fn first_day(year: i64) -> i64 {
    let before = year - 1;
    (year - 1970) * 365 + (before / 4 - before / 100 + before / 400) - (1969 / 4 - 1969 / 100 + 1969 / 400)
}

/// Year, month and day of a number of days since 1970-01-01, which must not be negative.
pub fn civil(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days / 366;
    while first_day(year + 1) <= days {
        year += 1;
    }
    let mut left = days - first_day(year);
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_as_python_gives_them() {
        let all = "%a %A %b %B %d %-d %e %m %y %Y %H %I %M %S %p %j %F %T %%";
        assert_eq!(
            format(1_709_210_096, all).unwrap(),
            "Thu Thursday Feb February 29 29 29 02 24 2024 12 12 34 56 PM 060 2024-02-29 12:34:56 %"
        );
        assert_eq!(format(0, "%-d %B %Y, %-I %p").unwrap(), "1 January 1970, 12 AM");
        assert_eq!(format(4_102_444_799, "%d %b %Y %j").unwrap(), "31 Dec 2099 365");
        assert_eq!(format(951_782_400, "%F").unwrap(), "2000-02-29");
        assert!(format(0, "%Q").unwrap_err().to_string().contains("%Q"));
        assert!(format(0, "%").is_err());
    }
}
