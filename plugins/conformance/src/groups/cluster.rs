//! Feed-forwards of blocks of neurons: every stage, non-linearity and threshold; mixed kinds; a layer in two stages.

use std::cell::OnceCell;
use std::rc::Rc;

use neuropil_device::{ActivationKind, Stage};

use super::{Values, tokens};
use crate::bounds;
use crate::case::{Cases, Ended, Found, Stop, compare, ensure, worse};
use crate::raw::Failure;
use crate::reference::{Reference, Step, feed_forward, has_cut, widen};
use crate::sample::{Fill, Kind};
use crate::subject::{Op, Question, Sampled, Stroke, Subject};

/// A threshold that cuts some neurons and leaves some.
const CUT: f32 = 0.25;

type Made<'a, S> = Result<(<S as Subject>::Weight<'a>, [<S as Subject>::Sample; 3]), Failure>;

/// A block that neighbouring cases share.
struct Block<'a, S: Subject> {
    subject: &'a S,
    kind: Kind,
    down: Kind,
    /// Neurons and width.
    shape: (usize, usize),
    made: OnceCell<Made<'a, S>>,
}

impl<'a, S: Subject> Block<'a, S> {
    fn new(subject: &'a S, kind: Kind, down: Kind, shape: (usize, usize)) -> Rc<Block<'a, S>> {
        Rc::new(Block { subject, kind, down, shape, made: OnceCell::new() })
    }

    fn get(&self) -> Result<&(S::Weight<'a>, [S::Sample; 3]), Stop> {
        let made = self.made.get_or_init(|| {
            let (neurons, width) = self.shape;
            let sample = |kind, shape, seed| self.subject.sample(kind, shape, Fill::Random, seed);
            let samples = [
                sample(self.kind, (neurons, width), 1),
                sample(self.kind, (neurons, width), 2),
                sample(self.down, (width, neurons), 3),
            ];
            let [gate, up, down] = &samples;
            self.subject.prepare(&[gate, up, down]).map(|weight| (weight, samples))
        });
        made.as_ref().map_err(|failure| Stop::failed("prepare", failure))
    }

    /// Runs one stage and compares.
    fn check(&self, stage: Stage, activation: ActivationKind, threshold: f32, tokens: usize) -> Ended {
        self.ask(stage, activation, tokens)?;
        let (neurons, width) = self.shape;
        let (weight, samples) = self.get()?;
        // Small enough that no non-linearity leaves the range of F16.
        let x: Vec<f32> = Values::Random.input(tokens, width, 5).iter().map(|x| x * 0.5).collect();
        let left = Values::Random.input(tokens, neurons, 6);
        let want = reference(samples, stage, (activation, threshold), &x, &left);
        let stroke = Stroke {
            stage,
            activation,
            threshold,
            tokens,
            x: if stage.reads_x() { &x } else { &[] },
            hidden: if stage.has_hidden() { &left } else { &[] },
            y: if stage.has_down() { tokens * width } else { 0 },
        };
        let found = self.subject.cluster(weight, &stroke);
        let found = found.map_err(|failure| Stop::failed("cluster", &failure))?;
        let bound = bounds::cluster(self.kind, self.down);
        if !stage.has_down() {
            return compare(&want, &found.hidden, bound);
        }
        let stays = found.hidden.iter().zip(stroke.hidden).all(|(is, was)| is.to_bits() == was.to_bits());
        ensure(stays, || "hidden, which stays in this stage, was written".into())?;
        compare(&want, &found.y, bound)
    }

    fn ask(&self, stage: Stage, activation: ActivationKind, tokens: usize) -> Result<(), Stop> {
        let (rows, cols) = self.shape;
        let op = Op::Cluster(stage, activation, self.down);
        self.subject.ask(&Question { op, kind: self.kind, rows, cols, tokens }).map_err(Stop::answer)
    }

    /// A layer in two stages has what one in a single stage has.
    fn check_two_stages(&self, first: Stage, second: Stage, activation: ActivationKind) -> Ended {
        let tokens = super::least(self.subject);
        let (neurons, width) = self.shape;
        for stage in [first, second] {
            self.ask(stage, activation, tokens)?;
        }
        let (weight, samples) = self.get()?;
        let x: Vec<f32> = Values::Random.input(tokens, width, 8).iter().map(|x| x * 0.5).collect();
        let nothing = vec![f32::NAN; tokens * neurons];
        let run = |stage: Stage, hidden: &[f32]| {
            let stroke = Stroke {
                stage,
                activation,
                threshold: 0.0,
                tokens,
                x: if stage.reads_x() { &x } else { &[] },
                hidden,
                y: if stage.has_down() { tokens * width } else { 0 },
            };
            self.subject.cluster(weight, &stroke).map_err(|failure| Stop::failed("cluster", &failure))
        };
        let hidden = run(first, &nothing)?.hidden;
        let y = run(second, &hidden)?.y;
        let want = reference(samples, Stage::Fused, (activation, 0.0), &x, &[]);
        compare(&want, &y, bounds::cluster(self.kind, self.down))
    }
}

fn reference<S: Sampled>(
    [gate, up, down]: &[S; 3],
    stage: Stage,
    (activation, threshold): (ActivationKind, f32),
    x: &[f32],
    left: &[f32],
) -> Reference {
    let (x, left) = (widen(x), widen(left));
    let step = Step { stage, activation, threshold: f64::from(threshold), x: &x, left: &left };
    feed_forward(gate.elements(), up.elements(), down.elements(), &step)
}

/// Neurons and widths: what the kinds of all three matrices can have.
fn shapes(kind: Kind, down: Kind) -> Vec<(usize, usize)> {
    match kind.granularity().max(down.granularity()) {
        1 => vec![(32, 64), (19, 45)],
        2 => vec![(32, 64), (18, 46)],
        32 => vec![(32, 64), (96, 32)],
        _ => vec![(256, 256)],
    }
}

/// The non-linearities and thresholds that make a difference to a stage.
fn activations(stage: Stage) -> Vec<(ActivationKind, f32)> {
    if !stage.has_up() {
        return vec![(ActivationKind::Linear, 0.0)];
    }
    let each = ActivationKind::NAMES.into_iter().flat_map(|(_, kind)| {
        let cut = has_cut(kind).then_some((kind, CUT));
        [(kind, 0.0)].into_iter().chain(cut)
    });
    each.collect()
}

pub fn cases<'a, S: Subject>(subject: &'a S, cases: &mut Cases<'a>) {
    let kinds = subject.kinds();
    for kind in &kinds {
        let kind = *kind;
        for shape in shapes(kind, kind) {
            let block = Block::new(subject, kind, kind, shape);
            for stage in Stage::ALL {
                for (activation, threshold) in activations(stage) {
                    stages(&block, stage, (activation, threshold), cases);
                }
            }
            for (_, activation) in ActivationKind::NAMES {
                for (first, second) in [(Stage::GateUp, Stage::Down), (Stage::Gate, Stage::UpDown)] {
                    let id = format!(
                        "cluster/{}-then-{}/{}/{}x{}/{}",
                        first.name(),
                        second.name(),
                        kind.name(),
                        shape.0,
                        shape.1,
                        activation.name()
                    );
                    let block = block.clone();
                    cases.add(id, move || block.check_two_stages(first, second, activation));
                }
            }
        }
    }
    for (index, kind) in kinds.iter().enumerate() {
        for (other, down) in kinds.iter().enumerate() {
            let is_type = matches!(kind, Kind::Type(_));
            if index == other || is_type && !(index + other).is_multiple_of(5) {
                continue;
            }
            let (kind, down) = (*kind, *down);
            let id = format!("cluster/mixed/{}/{}", kind.name(), down.name());
            cases.add(id, move || mixed(subject, kind, down));
        }
    }
}

fn stages<'a, S: Subject>(
    block: &Rc<Block<'a, S>>,
    stage: Stage,
    (activation, threshold): (ActivationKind, f32),
    cases: &mut Cases<'a>,
) {
    let (neurons, width) = block.shape;
    let counts = tokens(block.subject);
    // Types of model files are many: a device gets one token count each.
    let few = if matches!(block.kind, Kind::Type(_)) { 1 } else { 2 };
    for tokens in counts.into_iter().rev().filter(|tokens| *tokens <= 16).take(few) {
        let of_threshold = if threshold > 0.0 { format!("-above-{threshold}") } else { String::new() };
        let id = format!(
            "cluster/{}/{}/{neurons}x{width}/t{tokens}/{}{of_threshold}",
            stage.name(),
            block.kind.name(),
            activation.name()
        );
        let block = block.clone();
        cases.add(id, move || block.check(stage, activation, threshold, tokens));
    }
}

fn mixed<S: Subject>(subject: &S, kind: Kind, down: Kind) -> Ended {
    let shape = shapes(kind, down).first().copied().unwrap_or((32, 64));
    let block = Block::new(subject, kind, down, shape);
    let mut all = Found::default();
    for activation in [ActivationKind::Silu, ActivationKind::Relu] {
        all = worse(all, block.check(Stage::Fused, activation, 0.0, super::least(subject))?);
    }
    Ok(all)
}
