//! A unit behind the C border, with nothing between it and the suite.

use std::path::Path;

use neuropil_device::{ActivationKind, Stage};
use neuropil_plugin_abi::{self as abi, AbiStruct, NpClusterJob, NpQuery};

use crate::case::Cases;
use crate::groups;
use crate::raw::{Cluster, Device, Failure, LoadError, Plugin, Weight, library_of_crate};
use crate::reference::Elements;
use crate::sample::{Fill, Kind, Sample, group};
use crate::subject::{Op, Question, Sampled, Stroke, Subject};

/// A plugin that was loaded, with the options that its unit is opened with.
#[derive(Clone)]
pub struct Library {
    /// Its functions.
    pub plugin: Plugin,
    /// The options, key and value.
    pub options: Vec<(String, String)>,
}

impl Library {
    /// Loads a plugin.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(path: &Path, options: &[(&str, &str)]) -> Result<Library, LoadError> {
        let own = |(key, value): &(&str, &str)| (key.to_string(), value.to_string());
        Ok(Library { plugin: Plugin::open_library(path)?, options: options.iter().map(own).collect() })
    }

    /// Loads the plugin of a crate whose test is running, which cargo has built beside the test.
    ///
    /// # Panics
    /// When it is not there, or is no plugin.
    pub fn of_crate(name: &str, options: &[(&str, &str)]) -> Library {
        Library::load(&library_of_crate(name), options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The options as pairs of texts.
    pub fn pairs(&self) -> Vec<(&str, &str)> {
        self.options.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    /// Opens a unit.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn open(&self, index: u64) -> Result<Border, Failure> {
        let device = self.plugin.open(index, &self.pairs())?;
        let info = device.try_info()?;
        let buckets = info.token_buckets.iter().map(|tokens| usize::try_from(*tokens).unwrap_or(usize::MAX));
        let buckets = buckets.collect();
        let parallel = info.flags & abi::NP_DEVICE_PARALLEL != 0;
        Ok(Border { library: self.clone(), device, buckets, parallel })
    }
}

/// An open unit of a plugin.
pub struct Border {
    /// Its plugin.
    pub library: Library,
    /// The unit.
    pub device: Device,
    buckets: Vec<usize>,
    parallel: bool,
}

/// The header's number of a stage.
pub fn stage_number(stage: Stage) -> u32 {
    match stage {
        Stage::Gate => abi::NP_STAGE_GATE,
        Stage::Up => abi::NP_STAGE_UP,
        Stage::Down => abi::NP_STAGE_DOWN,
        Stage::GateUp => abi::NP_STAGE_GATE_UP,
        Stage::UpDown => abi::NP_STAGE_UP_DOWN,
        Stage::Fused => abi::NP_STAGE_FUSED,
    }
}

/// The header's number of a non-linearity.
pub fn activation_number(kind: ActivationKind) -> u32 {
    match kind {
        ActivationKind::Silu => abi::NP_ACT_SILU,
        ActivationKind::Gelu => abi::NP_ACT_GELU,
        ActivationKind::Relu => abi::NP_ACT_RELU,
        ActivationKind::Relu2 => abi::NP_ACT_RELU2,
        ActivationKind::Drelu => abi::NP_ACT_DRELU,
        ActivationKind::Linear => abi::NP_ACT_LINEAR,
    }
}

/// A question as the header has it.
pub fn query(question: &Question) -> NpQuery {
    let mut query = NpQuery {
        op: abi::NP_OP_MATMUL,
        scheme: question.kind.scheme(),
        rows: question.rows as u64,
        cols: question.cols as u64,
        group: group(question.kind.scheme()),
        tokens: question.tokens as u64,
        ..NpQuery::new()
    };
    if let Op::Cluster(stage, activation, down) = question.op {
        query.op = abi::NP_OP_CLUSTER;
        (query.stage, query.activation) = (stage_number(stage), activation_number(activation));
        query.down_scheme = down.scheme();
        query.group = query.group.max(group(down.scheme()));
    }
    query
}

impl Sampled for Sample {
    fn elements(&self) -> Elements<'_> {
        Elements { values: &self.values, cols: self.cols }
    }
}

impl Subject for Border {
    type Sample = Sample;
    type Weight<'a> = Weight<'a>;

    fn kinds(&self) -> Vec<Kind> {
        Kind::of_border()
    }

    fn buckets(&self) -> &[usize] {
        &self.buckets
    }

    fn is_parallel(&self) -> bool {
        self.parallel
    }

    fn ask(&self, question: &Question) -> Result<(), Failure> {
        let flags = self.device.query(&query(question))?;
        let how = flags & (abi::NP_SUPPORT_NATIVE | abi::NP_SUPPORT_EMULATED);
        if how.count_ones() != 1 {
            return Err(Failure::breach(format!(
                "the flags {flags} say neither native nor emulated, or both"
            )));
        }
        let down = if let Op::Cluster(_, _, down) = question.op { down } else { question.kind };
        if [question.kind, down].contains(&Kind::Outliers) && flags & abi::NP_SUPPORT_OUTLIERS == 0 {
            return Err(Failure::unsupported("it takes no outlier columns"));
        }
        Ok(())
    }

    fn sample(&self, kind: Kind, (rows, cols): (usize, usize), fill: Fill, seed: u64) -> Sample {
        let sample = Sample::filled(kind.scheme(), rows, cols, fill, seed);
        if kind == Kind::Outliers { sample.with_outliers(seed + 1) } else { sample }
    }

    fn prepare(&self, samples: &[&Sample]) -> Result<Weight<'_>, Failure> {
        self.device.prepare(samples)
    }

    fn matmul(&self, weights: &[&Weight<'_>], x: &[f32], tokens: usize) -> Result<Vec<Vec<f32>>, Failure> {
        self.device.matmul(weights, x, tokens)
    }

    fn cluster(&self, weight: &Weight<'_>, stroke: &Stroke<'_>) -> Result<Cluster, Failure> {
        let job = cluster_job(stroke);
        self.device.cluster(weight, &job, stroke.x, stroke.hidden, stroke.y)
    }

    fn own_cases<'a>(&'a self, group: &str, cases: &mut Cases<'a>) {
        match group {
            "info" => groups::info::of_unit(self, cases),
            "buffer" => groups::buffer::cases(self, cases),
            "weight" => groups::plan::cases(self, cases),
            "completion" => groups::completion::cases(self, cases),
            "errors" => groups::errors::cases(self, cases),
            "threads" => groups::threads::of_plugin(self, cases),
            "soak" => groups::soak::of_plugin(self, cases),
            "timing" => groups::timing::of_plugin(self, cases),
            _ => {}
        }
    }
}

/// A job of the header without weight and buffers.
pub fn cluster_job(stroke: &Stroke<'_>) -> NpClusterJob {
    NpClusterJob {
        stage: stage_number(stroke.stage),
        activation: activation_number(stroke.activation),
        threshold: stroke.threshold,
        tokens: stroke.tokens as u64,
        ..NpClusterJob::new()
    }
}
