//! The cache of neurons against a naive twin: the same questions in random order, with holds, failed reads, hot neurons
//! and a changing size, for every policy.

mod rules;
mod twin;

use neuropil::cache::{Eviction, Lru, Odds, Parts, S3Fifo, Window};
use proptest::prelude::*;

use twin::{Twin, UNITS};

/// Every policy by name.
fn policies() -> Vec<Box<dyn Eviction>> {
    let prior = [0.9, 0.5, 0.2, 0.1, 0.05, 0.01, 0.0];
    vec![
        Box::new(Lru::default()),
        Box::new(S3Fifo::default()),
        Box::new(Odds::new(&prior)),
        Box::new(Window::new(2)),
    ]
}

/// Something that a user of the cache does. Numbers pick among what there is at that time.
#[derive(Clone, Debug)]
enum Step {
    Acquire { unit: usize, mask: u16, parts: Parts },
    Upgrade { group: usize, parts: Parts },
    Loaded { read: usize, ok: bool },
    Release { group: usize },
    SetHot { unit: usize, count: usize },
    Place { unit: usize, position: u32 },
    Resize { slots: usize },
    Tick,
}

fn parts() -> impl Strategy<Value = Parts> {
    prop_oneof![Just(Parts::GATE), Just(Parts::UP_DOWN), Just(Parts::BOTH)]
}

fn step() -> impl Strategy<Value = Step> {
    let unit = 0..UNITS.len();
    prop_oneof![
        8 => (unit.clone(), any::<u16>(), any::<u16>(), parts())
            .prop_map(|(unit, a, b, parts)| Step::Acquire { unit, mask: a & b, parts }),
        2 => (any::<usize>(), parts()).prop_map(|(group, parts)| Step::Upgrade { group, parts }),
        12 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(read, ok)| Step::Loaded { read, ok }),
        7 => any::<usize>().prop_map(|group| Step::Release { group }),
        1 => (unit.clone(), 0..12usize).prop_map(|(unit, count)| Step::SetHot { unit, count }),
        1 => (unit, 0..5u32).prop_map(|(unit, position)| Step::Place { unit, position }),
        1 => (0..20usize).prop_map(|slots| Step::Resize { slots }),
        2 => Just(Step::Tick),
    ]
}

fn follow(policy: Box<dyn Eviction>, slots: usize, steps: &[Step]) {
    let mut twin = Twin::new(policy, slots);
    for step in steps {
        match step {
            Step::Acquire { unit, mask, parts } => twin.acquire(*unit, *mask, *parts),
            Step::Upgrade { group, parts } => twin.upgrade(*group, *parts),
            Step::Loaded { read, ok } => twin.loaded(*read, *ok),
            Step::Release { group } => twin.release(*group),
            Step::SetHot { unit, count } => twin.set_hot(*unit, *count),
            Step::Place { unit, position } => twin.place(*unit, *position),
            Step::Resize { slots } => twin.resize(*slots),
            Step::Tick => twin.end_step(),
        }
        twin.check();
    }
    twin.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_policy_keeps_the_rules(slots in 1..20usize, steps in prop::collection::vec(step(), 1..120)) {
        for policy in policies() {
            follow(policy, slots, &steps);
        }
    }
}
