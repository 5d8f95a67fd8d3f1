//! Keeps what is most likely to be asked for in the next step, by what is known of firing frequencies and what is
//! learned while it runs.
//!
//! How likely a neuron is to fire depends on two things: how often it fires at all, which calibration has counted, and
//! how long ago it last did, because adjacent tokens are alike. How strong the second is differs from model to model and
//! from text to text, so it is measured: of the neurons of one class of frequency that were not asked for in so many
//! steps, which share was asked for in the next one? The neuron goes for which that share is least. Neurons that have
//! lost their slot are counted too, or it would never learn that they come back.
//!
//! In a class the odds fall with age, so the class's oldest neuron stands for it, and a choice compares one neuron per
//! class. Without frequencies there is one class, and this is LRU.

use std::collections::TryReserveError;

use super::queues::Queues;
use super::s3fifo::grow;
use super::{Eviction, Held};

/// Classes of frequency; each is rarer by the square root of two.
const CLASSES: usize = 14;

/// Steps that are looked back.
const SPAN: usize = 128;

/// Ages that are told apart: single steps first, then wider and wider; the last is all that is older.
const AGES: usize = 16;

/// The first age of each.
const STARTS: [usize; AGES] = [0, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 28, 40, 64, SPAN];

/// Which of them an age is.
const AGE: [u8; SPAN] = {
    let (mut ages, mut age, mut known) = ([0; SPAN], 0, 0);
    while age < SPAN {
        if STARTS[known + 1] == age {
            known += 1;
        }
        ages[age] = known as u8;
        age += 1;
    }
    ages
};

/// What is assumed counts as if it had been observed in so many neurons and steps.
const TRUST: f32 = 10.0;

/// What was observed counts half after so many steps.
const HALF_LIFE: f32 = 8.0;

/// What is known of a slot, in one place: a victim is looked at once.
#[derive(Clone, Copy, Default)]
struct State {
    neuron: u32,
    /// The last step in which the neuron was asked for.
    used: u32,
}

/// See the module.
pub struct Odds {
    /// One queue per class.
    queues: Queues,
    classes: Box<[Class; CLASSES]>,
    /// The class of each neuron, and the last step in which it was asked for, as of when it last lost its slot.
    class_of: Vec<u8>,
    last: Vec<u32>,
    slots: Vec<State>,
    step: u32,
    /// The furthest neuron asked for in this step: those up to here will not be asked for before the next.
    passed: u32,
}

/// What is known of neurons of about the same frequency.
#[derive(Clone, Copy)]
struct Class {
    frequency: f32,
    neurons: u32,
    /// Neurons last asked for in each of the last steps.
    cohorts: [u32; SPAN],
    /// Those of each age that were asked for in this step,
    asked: [u32; AGES],
    /// and in all, and how many there were of that age; older steps count less.
    hits: [f32; AGES],
    exposed: [f32; AGES],
    odds: [f32; AGES],
}

impl Odds {
    /// With the firing frequency of each neuron, over all units; those beyond the list count as rare.
    pub fn new(prior: &[f32]) -> Odds {
        let class_of = |p: &f32| (-2.0 * p.max(1e-9).log2()).round().clamp(0.0, (CLASSES - 1) as f32) as u8;
        let class = |class| Class::new((-0.5 * class as f32).exp2());
        Odds {
            queues: Queues::new(CLASSES),
            classes: Box::new(std::array::from_fn(class)),
            class_of: prior.iter().map(class_of).collect(),
            last: Vec::new(),
            slots: Vec::new(),
            step: SPAN as u32,
            passed: 0,
        }
    }

    /// The oldest of a class, and its odds.
    fn front(&mut self, class: usize) -> Option<(f32, u32)> {
        let slot = self.queues.front(class)?;
        Some((self.odds(class, slot), slot))
    }

    /// The odds of what is in a slot of a class.
    fn odds(&self, class: usize, slot: u32) -> f32 {
        let State { neuron, used } = self.slots[slot as usize];
        let age = self.step - used + u32::from(neuron <= self.passed);
        self.classes[class].odds[known_age(age)]
    }
}

impl Class {
    fn new(frequency: f32) -> Class {
        let mut class = Class {
            frequency,
            neurons: 0,
            cohorts: [0; SPAN],
            asked: [0; AGES],
            hits: [0.0; AGES],
            exposed: [0.0; AGES],
            odds: [0.0; AGES],
        };
        class.update();
        class
    }

    /// A neuron last asked for in step `before` is asked for in step `now`.
    #[inline]
    fn observe(&mut self, before: u32, now: u32) {
        let age = now - before;
        if age < SPAN as u32 {
            self.cohorts[before as usize % SPAN] -= 1;
        }
        self.cohorts[now as usize % SPAN] += 1;
        self.asked[known_age(age)] += 1;
    }

    /// A step ended.
    fn learn(&mut self, step: u32) {
        let fade = 0.5f32.powf(1.0 / HALF_LIFE);
        self.exposed.iter_mut().chain(&mut self.hits).for_each(|sum| *sum *= fade);
        let mut old = self.neurons - self.cohorts[step as usize % SPAN];
        for age in 1..SPAN as u32 {
            let cohort = self.cohorts[(step - age) as usize % SPAN];
            old -= cohort;
            self.exposed[known_age(age)] += cohort as f32;
        }
        self.exposed[AGES - 1] += old as f32;
        for ((hits, exposed), asked) in self.hits.iter_mut().zip(&mut self.exposed).zip(&mut self.asked) {
            // Those that were asked for have left the cohorts of their age.
            *hits += *asked as f32;
            *exposed += *asked as f32;
            *asked = 0;
        }
        // The next step takes the place of the one that is now too long ago.
        self.cohorts[(step + 1) as usize % SPAN] = 0;
        self.update();
    }

    /// Where little was observed yet, a neuron is taken to be as likely as one that is a little younger.
    fn update(&mut self) {
        let mut likely = 0.5 + 0.5 * self.frequency;
        for age in 0..AGES {
            if age == AGES - 1 {
                likely = self.frequency;
            }
            likely = (self.hits[age] + TRUST * likely) / (self.exposed[age] + TRUST);
            self.odds[age] = likely;
        }
    }
}

#[inline]
fn known_age(age: u32) -> usize {
    AGE.get(age as usize).map_or(AGES - 1, |known| usize::from(*known))
}

impl Eviction for Odds {
    fn name(&self) -> &'static str {
        "odds"
    }

    fn reserve(&mut self, slots: usize, neurons: usize) -> Result<(), TryReserveError> {
        self.queues.reserve(slots)?;
        grow(&mut self.class_of, neurons, (CLASSES - 1) as u8)?;
        grow(&mut self.last, neurons, 0)?;
        grow(&mut self.slots, slots, State::default())?;
        self.classes.iter_mut().for_each(|class| class.neurons = 0);
        self.class_of.iter().for_each(|class| self.classes[usize::from(*class)].neurons += 1);
        Ok(())
    }

    fn insert(&mut self, slots: &[u32], neurons: &[u32]) {
        for (slot, neuron) in slots.iter().zip(neurons).rev() {
            let used = self.last[*neuron as usize];
            self.slots[*slot as usize] = State { neuron: *neuron, used };
            self.queues.push(usize::from(self.class_of[*neuron as usize]), *slot);
        }
    }

    fn asked(&mut self, slots: &[u32]) {
        let Some(last) = slots.last() else { return };
        self.passed = self.passed.max(self.slots[*last as usize].neuron);
        for slot in slots.iter().rev() {
            let used = &mut self.slots[*slot as usize].used;
            let Some(class) = self.queues.queue_of(*slot).filter(|_| *used != self.step) else { continue };
            self.classes[class].observe(*used, self.step);
            *used = self.step;
            self.queues.push(class, *slot);
        }
    }

    fn remove(&mut self, slots: &[u32]) {
        for slot in slots {
            let State { neuron, used } = self.slots[*slot as usize];
            self.last[neuron as usize] = used;
            self.queues.remove(*slot);
        }
    }

    fn evict(&mut self, count: usize, held: &Held<'_>, out: &mut Vec<u32>) {
        let mut wanted = count;
        // What is held goes to the end of its queue, and is not looked at twice.
        let mut left: [usize; CLASSES] = std::array::from_fn(|class| self.queues.len(class));
        // The front of each queue with its odds, of which a victim changes one.
        let mut fronts: [Option<(f32, u32)>; CLASSES] = std::array::from_fn(|class| self.front(class));
        while wanted > 0 {
            let mut least: Option<(f32, usize, u32)> = None;
            for (class, front) in fronts.iter().enumerate() {
                if let Some((odds, slot)) = front
                    && least.is_none_or(|least| *odds <= least.0)
                {
                    least = Some((*odds, class, *slot));
                }
            }
            let Some((_, class, slot)) = least else { break };
            if held.contains(slot) {
                self.queues.push(class, slot);
            } else {
                self.remove(&[slot]);
                out.push(slot);
                wanted -= 1;
            }
            left[class] -= 1;
            fronts[class] = if left[class] > 0 { self.front(class) } else { None };
        }
    }

    fn tick(&mut self, _held: &Held<'_>, _out: &mut Vec<u32>) {
        self.classes.iter_mut().for_each(|class| class.learn(self.step));
        self.step += 1;
        self.passed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_begin_where_they_should() {
        for (known, start) in STARTS.iter().enumerate() {
            assert_eq!(known_age(*start as u32), known);
            assert!(*start == 0 || known_age(*start as u32 - 1) == known - 1);
        }
        assert_eq!(known_age(u32::MAX), AGES - 1);
    }

    /// In one class every second neuron fires in bursts; the odds that are learned are those of the bursts.
    #[test]
    fn odds_are_learned_from_what_is_asked() {
        let mut policy = Odds::new(&[0.5; 100]);
        policy.reserve(100, 100).unwrap();
        let slots: Vec<u32> = (0..100).collect();
        policy.insert(&slots, &slots);
        let none: [super::super::slot::Slot; 0] = [];
        for step in 0..60u32 {
            // Each neuron fires twice, then rests for 18 steps.
            let fire: Vec<u32> = slots.iter().copied().filter(|n| (n / 5 + step) % 20 < 2).collect();
            policy.asked(&fire);
            policy.tick(&Held(&none), &mut Vec::new());
        }
        let odds = policy.classes[2].odds;
        assert!((odds[0] - 0.5).abs() < 0.05, "after one step: {odds:?}");
        assert!(odds[1..10].iter().all(|odds| *odds < 0.1), "while they rest: {odds:?}");
    }
}
