//! In which scheme a weight goes to the unit: the first of the type's schemes that the unit takes and that passed its
//! test.

use neuropil_device::{ActivationKind, DType, OpShape, Stage, Support};

use crate::Scheme;
use crate::border::{Answer, Question};
use crate::session::Session;

/// Tokens in questions to a unit that takes any count.
const ANY_TOKENS: usize = 128;

/// How a matrix goes to the unit.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub scheme: Scheme,
    pub outliers: bool,
    pub emulated: bool,
    /// Token counts that it has graphs for; none for any.
    pub buckets: Vec<usize>,
}

/// How a block of neurons goes to the unit.
#[derive(Clone, Debug)]
pub(crate) enum BlockChoice {
    /// Whole; the scheme of down besides.
    Whole(Choice, Scheme),
    /// As three matrices: the unit multiplies, and the host does the rest.
    Apart { gate: Choice, up: Choice, down: Choice },
}

impl Session {
    /// The buckets for which the answer to a question is yes, and that answer; or the reason.
    fn buckets(&mut self, question: impl Fn(usize) -> Question) -> Result<(Vec<usize>, Answer), String> {
        if self.info.token_buckets.is_empty() {
            return self.ask(question(ANY_TOKENS)).map(|answer| (Vec::new(), answer));
        }
        let mut yes: Option<(Vec<usize>, Answer)> = None;
        let mut no = String::new();
        for bucket in self.info.token_buckets.clone() {
            match self.ask(question(bucket)) {
                Ok(answer) => match &mut yes {
                    Some((buckets, _)) => buckets.push(bucket),
                    None => yes = Some((vec![bucket], answer)),
                },
                Err(reason) => no = reason,
            }
        }
        yes.ok_or(no)
    }

    /// How a matrix of one scheme goes to the unit, if it does.
    pub(crate) fn choice(&mut self, scheme: Scheme, rows: usize, cols: usize) -> Result<Choice, String> {
        if scheme.bytes(rows, cols).is_none() {
            return Err(format!("{cols} columns do not fit the scheme"));
        }
        let question = |tokens| Question { scheme, cluster: None, rows, cols, tokens };
        let (buckets, answer) = self.buckets(question)?;
        Ok(Choice { scheme, outliers: answer.outliers, emulated: answer.emulated, buckets })
    }

    /// How a matrix goes to the unit; or why it does not.
    pub(crate) fn choose_matrix(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<Choice, String> {
        let mut reasons = Vec::new();
        for scheme in Scheme::candidates(dtype, self.options.weights) {
            match self.choice(scheme, rows, cols) {
                Ok(choice) => return Ok(choice),
                Err(reason) => reasons.push(format!("{}: {reason}", scheme.name())),
            }
        }
        Err(reasons.join("; "))
    }

    /// How a whole block of two schemes goes to the unit, if it does with every activation.
    pub(crate) fn block_choice(
        &mut self,
        stage: Stage,
        (scheme, down): (Scheme, Scheme),
        (neurons, width): (usize, usize),
    ) -> Result<Choice, String> {
        if !self.has_clusters() {
            return Err("the plugin does not offer cluster".into());
        }
        if scheme.bytes(neurons, width).is_none() || down.bytes(width, neurons).is_none() {
            return Err(format!("{neurons} neurons of width {width} do not fit the scheme"));
        }
        let mut choice: Option<Choice> = None;
        for (_, activation) in ActivationKind::NAMES {
            let cluster = Some((stage, activation, down));
            let question = |tokens| Question { scheme, cluster, rows: neurons, cols: width, tokens };
            let (buckets, answer) = self.buckets(question)?;
            let both = choice.map_or_else(
                || buckets.clone(),
                |c| c.buckets.into_iter().filter(|bucket| buckets.contains(bucket)).collect(),
            );
            if both.is_empty() && !self.info.token_buckets.is_empty() {
                return Err("its activations have no bucket in common".into());
            }
            let (outliers, emulated) = (answer.outliers, answer.emulated);
            choice = Some(Choice { scheme, outliers, emulated, buckets: both });
        }
        choice.ok_or_else(String::new)
    }

    /// How a block of neurons goes to the unit: whole if it can, otherwise as three matrices.
    pub(crate) fn choose_block(
        &mut self,
        [gate, up, down]: [DType; 3],
        neurons: usize,
        width: usize,
    ) -> Result<BlockChoice, String> {
        for scheme in Scheme::candidates(gate, self.options.weights) {
            for down in Scheme::candidates(down, self.options.weights) {
                let choice = self.block_choice(Stage::Fused, (scheme, down), (neurons, width));
                if let Some(choice) = choice.ok().filter(|_| self.pair_works(scheme, down)) {
                    return Ok(BlockChoice::Whole(choice, down));
                }
            }
        }
        Ok(BlockChoice::Apart {
            gate: self.choose_matrix(gate, neurons, width)?,
            up: self.choose_matrix(up, neurons, width)?,
            down: self.choose_matrix(down, width, neurons)?,
        })
    }

    /// The answer to [`neuropil_device::Device::supports`].
    pub(crate) fn supports(&mut self, op: &OpShape) -> Support {
        let kind = |emulated| if emulated { Support::Emulated } else { Support::Native };
        let answer = match *op {
            OpShape::Matmul { dtype, rows, cols, .. } => {
                self.choose_matrix(dtype, rows, cols).map(|choice| kind(choice.emulated))
            }
            OpShape::Cluster { bundles: true, .. } => {
                Err("single neurons: it takes blocks that were prepared".into())
            }
            OpShape::Cluster { stage, dtype, down_dtype, neurons, width, .. } => {
                match self.choose_block([dtype, dtype, down_dtype], neurons, width) {
                    Ok(BlockChoice::Whole(choice, down)) => self
                        .block_choice(stage, (choice.scheme, down), (neurons, width))
                        .map(|choice| kind(choice.emulated)),
                    Ok(BlockChoice::Apart { .. }) => Ok(Support::Emulated),
                    Err(reason) => Err(reason),
                }
            }
            _ => Err("whole transformer blocks".into()),
        };
        answer.unwrap_or_else(Support::No)
    }
}
