//! The fewest misses that are possible: who goes is who is needed last (Belady).

use std::collections::BTreeSet;

use super::replay::{EARLY, Misses};
use super::trace::Trace;

/// What misses with so many slots, when they begin with the hottest neurons.
pub fn best(trace: &Trace, slots: usize) -> Misses {
    let neurons = trace.units[0];
    let units = trace.units.len();
    // For each neuron the times at which it fires, the last first.
    let mut uses: Vec<Vec<u32>> = vec![Vec::new(); neurons * units];
    for (token, step) in trace.steps.iter().enumerate().rev() {
        for (unit, positions) in step.iter().enumerate() {
            let time = (token * units + unit) as u32;
            positions.iter().for_each(|p| uses[unit * neurons + *p as usize].push(time));
        }
    }
    let next = |uses: &[u32]| uses.last().copied().unwrap_or(u32::MAX);
    let mut here = vec![false; uses.len()];
    let mut order = BTreeSet::new();
    for neuron in trace.hottest(slots) {
        here[neuron as usize] = true;
        order.insert((next(&uses[neuron as usize]), neuron));
    }
    let (mut missed, mut asked) = ([0u64; 2], [0u64; 2]);
    for (token, step) in trace.steps.iter().enumerate() {
        let late = usize::from(token >= EARLY);
        for (unit, positions) in step.iter().enumerate() {
            let group: Vec<usize> = positions.iter().map(|p| unit * neurons + *p as usize).collect();
            asked[late] += group.len() as u64;
            let mut loads = 0;
            for neuron in &group {
                let now = uses[*neuron].pop().unwrap();
                if here[*neuron] {
                    order.remove(&(now, *neuron as u32));
                } else {
                    loads += 1;
                }
            }
            missed[late] += loads as u64;
            while order.len() + group.len() > slots {
                let Some((_, victim)) = order.pop_last() else { break };
                here[victim as usize] = false;
            }
            for neuron in group {
                here[neuron] = true;
                order.insert((next(&uses[neuron]), neuron as u32));
            }
        }
    }
    let share = |i: usize| missed[i] as f64 / asked[i] as f64;
    Misses { early: share(0), late: share(1) }
}
