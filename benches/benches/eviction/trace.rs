//! Which neurons fire, token by token: as in the synthetic models, without the models.
//!
//! A neuron fires when a normal value exceeds its threshold. The value is a sum of a part of the sequence, a part that
//! changes slowly (AR(1)) and a part of the token; the thresholds make firing frequencies logit-normal.

/// Tokens of a sequence; then another topic begins.
pub const SEQUENCE: usize = 128;

/// What a model and a text are like.
pub struct Kind {
    pub name: &'static str,
    /// Standard deviation of logit(p) in the first third of the layers, and in the others.
    pub sigma: [f64; 2],
    /// Shares of the value that belong to the sequence, and to the token alone.
    pub topic: f64,
    pub white: f64,
    /// Overlap of adjacent tokens.
    pub overlap: f64,
    /// Correlation of the logits of calibration with those of the text.
    pub known: f64,
}

const PAPER: Kind =
    Kind { name: "paper", sigma: [1.6, 2.3], topic: 0.2, white: 0.02, overlap: 0.84, known: 1.0 };
const SMOLLM2: Kind =
    Kind { name: "smollm2", sigma: [0.45, 1.35], topic: 0.0, white: 0.1, overlap: 0.41, known: 1.0 };

pub const KINDS: [Kind; 4] = [
    PAPER,
    Kind { name: "paper, calibrated on other text", known: 0.8, ..PAPER },
    SMOLLM2,
    Kind { name: "smollm2, calibrated on other text", known: 0.8, ..SMOLLM2 },
];

/// Share of neurons that fire.
const ACTIVE: f64 = 0.1;

pub struct Trace {
    pub units: Vec<usize>,
    /// `[token][unit]`: ascending positions, hottest by calibration first.
    pub steps: Vec<Vec<Vec<u32>>>,
    /// Firing frequency by calibration of each neuron, over all units.
    pub prior: Vec<f32>,
}

impl Trace {
    /// The neurons that calibration finds hottest, of all units.
    pub fn hottest(&self, count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.prior.len() as u32).collect();
        order.sort_by(|a, b| self.prior[*b as usize].total_cmp(&self.prior[*a as usize]));
        order.truncate(count);
        order
    }

    /// How many of the hottest lie in each unit.
    pub fn hot_counts(&self, count: usize) -> Vec<usize> {
        let mut counts = vec![0; self.units.len()];
        let neurons = self.units[0];
        self.hottest(count).iter().for_each(|neuron| counts[*neuron as usize / neurons] += 1);
        counts
    }

    /// Firings, and those that the token before had too.
    pub fn overlap(&self) -> f64 {
        let (mut shared, mut all) = (0, 0);
        for pair in self.steps.windows(2) {
            for (before, now) in pair[0].iter().zip(&pair[1]) {
                shared += now.iter().filter(|p| before.binary_search(p).is_ok()).count();
                all += now.len();
            }
        }
        shared as f64 / all as f64
    }
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Neurons of one unit with their state.
struct Neuron {
    threshold: f64,
    topic: f64,
    local: f64,
}

/// A trace of so many layers, neurons each, and tokens.
pub fn trace(kind: &Kind, layers: usize, neurons: usize, tokens: usize) -> Trace {
    let rho = rho(kind);
    let mut random = Random(7);
    let mut all = Vec::new();
    let mut prior = Vec::new();
    for layer in 0..layers {
        let sigma = kind.sigma[usize::from(layer >= layers / 3)];
        let mu = mean_logit(sigma);
        let mut unit: Vec<(f64, f64)> = (0..neurons)
            .map(|_| {
                let (known, other) = (random.normal(), random.normal());
                let text = kind.known * known + (1.0 - kind.known * kind.known).sqrt() * other;
                (logistic(mu + sigma * known), logistic(mu + sigma * text))
            })
            .collect();
        unit.sort_by(|a, b| b.0.total_cmp(&a.0));
        prior.extend(unit.iter().map(|(known, _)| *known as f32));
        let neuron =
            |(_, p): &(f64, f64)| Neuron { threshold: probit(1.0 - p), topic: 0.0, local: random.normal() };
        all.push(unit.iter().map(neuron).collect::<Vec<_>>());
    }
    let [a, b, w] = [kind.topic, 1.0 - kind.topic - kind.white, kind.white].map(f64::sqrt);
    let kept = (1.0 - rho * rho).sqrt();
    let mut steps = Vec::new();
    for token in 0..tokens {
        let mut step = Vec::new();
        for unit in &mut all {
            let mut fired = Vec::new();
            for (position, neuron) in unit.iter_mut().enumerate() {
                if token % SEQUENCE == 0 {
                    (neuron.topic, neuron.local) = (random.normal(), random.normal());
                }
                neuron.local = rho * neuron.local + kept * random.normal();
                if a * neuron.topic + b * neuron.local + w * random.normal() > neuron.threshold {
                    fired.push(position as u32);
                }
            }
            step.push(fired);
        }
        steps.push(step);
    }
    Trace { units: vec![neurons; layers], steps, prior }
}

/// The coefficient of the slow part that gives the overlap, by trying.
fn rho(kind: &Kind) -> f64 {
    let overlap = |rho: f64| {
        let mut random = Random(3);
        let correlation = kind.topic + (1.0 - kind.topic - kind.white) * rho;
        let (mut both, mut one) = (0.0, 0.0);
        for i in 0..60_000 {
            let sigma = kind.sigma[usize::from(i % 3 > 0)];
            let p = logistic(mean_logit(sigma) + sigma * random.normal());
            let threshold = probit(1.0 - p);
            let x = random.normal();
            let y = correlation * x + (1.0 - correlation * correlation).sqrt() * random.normal();
            one += f64::from(x > threshold);
            both += f64::from(x > threshold && y > threshold);
        }
        both / one
    };
    bisect([0.0, 0.999], 9, |rho| overlap(rho) < kind.overlap)
}

/// The mean of logits with which the mean frequency is right.
fn mean_logit(sigma: f64) -> f64 {
    let grid = (0..50).map(|i| probit((f64::from(i) + 0.5) / 50.0));
    let grid: Vec<f64> = grid.collect();
    bisect([-20.0, 5.0], 30, |mu| grid.iter().map(|x| logistic(mu + sigma * x)).sum::<f64>() / 50.0 < ACTIVE)
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The normal value that is exceeded with probability 1 − p, to 1e-3 or so.
fn probit(p: f64) -> f64 {
    let tail = p.min(1.0 - p).max(1e-9);
    let t = (-2.0 * tail.ln()).sqrt();
    let x = t
        - (2.515_517 + 0.802_853 * t + 0.010_328 * t * t)
            / (1.0 + 1.432_788 * t + 0.189_269 * t * t + 0.001_308 * t * t * t);
    if p < 0.5 { -x } else { x }
}

fn bisect([mut low, mut high]: [f64; 2], steps: usize, below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..steps {
        let middle = 0.5 * (low + high);
        if below(middle) { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}
