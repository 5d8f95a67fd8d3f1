//! Jobs: everything that they name is looked up and measured before the plugin's own code runs.

use neuropil_plugin_abi::{NpBuffer, NpClusterJob, NpMatmulJob, NpProduct};

use super::read::{self, Values};
use super::state::State;
use crate::{Activation, ClusterJob, Deadline, Error, MatmulJob, PluginDevice, Product, Report, Shape};

/// Products of a job at most.
const MOST_PRODUCTS: u64 = 4;

/// # Safety
/// `job` is NULL or a job of the host, and what it names lives until this returns; nobody else touches its outputs.
pub(crate) unsafe fn matmul<D: PluginDevice>(
    state: &State<D>,
    job: *const NpMatmulJob,
) -> Result<Report, Error> {
    // SAFETY: the host vouches for the job and what it names.
    let job: NpMatmulJob = unsafe { read::read(job)? };
    let deadline = Deadline::after(job.deadline_ns);
    let tokens = state.tokens(job.tokens)?;
    if !(1..=MOST_PRODUCTS).contains(&job.product_count) || job.products.is_null() {
        return Err(Error::invalid(format!(
            "a job has 1 to {MOST_PRODUCTS} products, not {}",
            job.product_count
        )));
    }
    let mut weights = Vec::new();
    let mut outputs = Vec::new();
    let mut width = None;
    for index in 0..job.product_count as usize {
        // SAFETY: the array has as many pointers, each to a struct of the host.
        let product: NpProduct = unsafe { read::read(job.products.add(index).read_unaligned())? };
        let weight = state.weights.get(product.weight, "weight")?;
        let Shape::Matrix { rows, cols } = weight.shape else {
            return Err(Error::invalid("a block of neurons is not the weight of a matmul"));
        };
        if *width.get_or_insert(cols) != cols {
            return Err(Error::invalid("the weights of one job have different numbers of columns"));
        }
        // SAFETY: as above.
        outputs.push(unsafe { Values::new(product.y, tokens.checked_mul(rows), &state.memories, "y")? });
        weights.push((weight, rows));
    }
    let cols = width.unwrap_or(0);
    // SAFETY: as above.
    let x = unsafe { Values::new(job.x, tokens.checked_mul(cols), &state.memories, "x")? };
    for (index, y) in outputs.iter().enumerate() {
        if y.overlaps(&x) || outputs[..index].iter().any(|other| other.overlaps(y)) {
            return Err(Error::invalid("the outputs of a job overlap each other or its input"));
        }
    }
    let products = weights.iter().zip(&outputs).map(|((weight, rows), y)| Product {
        weight: &weight.weight,
        rows: *rows,
        // SAFETY: the outputs are disjoint, and the host touches none until the job is over.
        y: unsafe { y.output() },
    });
    // SAFETY: the host does not write the input until the job is over, and no output overlaps it.
    let x = unsafe { x.input() };
    let mut job = MatmulJob { tokens, cols, deadline, x, products: products.collect() };
    state.run(|| state.device.matmul(&mut job))
}

/// # Safety
/// As for [`matmul`].
pub(crate) unsafe fn cluster<D: PluginDevice>(
    state: &State<D>,
    job: *const NpClusterJob,
) -> Result<Report, Error> {
    // SAFETY: the host vouches for the job and what it names.
    let job: NpClusterJob = unsafe { read::read(job)? };
    let deadline = Deadline::after(job.deadline_ns);
    let tokens = state.tokens(job.tokens)?;
    let stage = read::stage(job.stage)?;
    let activation = Activation { kind: read::activation(job.activation)?, threshold: job.threshold };
    let weight = state.weights.get(job.weight, "weight")?;
    let Shape::Neurons { neurons, width } = weight.shape else {
        return Err(Error::invalid("a matrix is not the weight of a cluster"));
    };
    let values = |needed: bool, buffer: *const NpBuffer, cols: usize, what: &str| {
        // SAFETY: as above.
        needed
            .then(|| unsafe { Values::new(buffer, tokens.checked_mul(cols), &state.memories, what) })
            .transpose()
    };
    let has_hidden = !(stage.has_gate() && stage.has_down());
    let x = values(stage.has_gate() || stage.has_up(), job.x, width, "x")?;
    let hidden = values(has_hidden, job.hidden, neurons, "hidden")?;
    let y = values(stage.has_down(), job.y, width, "y")?;
    let overlap = |a: &Option<Values>, b: &Option<Values>| match (a, b) {
        (Some(a), Some(b)) => a.overlaps(b),
        _ => false,
    };
    if overlap(&x, &hidden) || overlap(&x, &y) || overlap(&hidden, &y) {
        return Err(Error::invalid("the buffers of a job overlap"));
    }
    let mut job = ClusterJob {
        stage,
        activation,
        tokens,
        neurons,
        width,
        deadline,
        weight: &weight.weight,
        // SAFETY: the host does not write the input until the job is over, and no output overlaps it.
        x: x.as_ref().map(|x| unsafe { x.input() }),
        // SAFETY: the buffers are disjoint, and the host touches none until the job is over.
        hidden: hidden.as_ref().map(|hidden| unsafe { hidden.output() }),
        // SAFETY: as above.
        y: y.as_ref().map(|y| unsafe { y.output() }),
    };
    state.run(|| state.device.cluster(&mut job))
}
