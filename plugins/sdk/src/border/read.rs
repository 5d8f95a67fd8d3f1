//! From pointers and lengths of the host to strings, slices and matrices.

use std::ffi::{c_char, c_void};
use std::slice;

use neuropil_plugin_abi::{
    AbiStruct, NpBuffer, NpMatrix, NpOption, NpOptions, NpQuery, NpRegion, NpWeightSource,
};

use super::state::{Handles, Imported};
use crate::{
    ActivationKind, Error, Input, Matrices, Matrix, Options, Outliers, Output, Placed, Query, Region, Scheme,
    Stage, WeightSource,
};

/// Options that are taken at most.
const MOST_OPTIONS: u64 = 1024;

pub(crate) fn size(value: u64, what: &str) -> Result<usize, Error> {
    usize::try_from(value).map_err(|_| Error::invalid(format!("{value} {what} are too many")))
}

/// # Safety
/// `from` is NULL or a struct of the host.
pub(crate) unsafe fn read<T: AbiStruct>(from: *const T) -> Result<T, Error> {
    // SAFETY: as of this function.
    let value = unsafe { T::read(from) };
    value.ok_or_else(|| Error::invalid(format!("a {} is missing or has no size", T::LAYOUT.name)))
}

/// Checks that a struct of the host has room for what this version fills in.
///
/// # Safety
/// `place` is NULL or a struct of the host.
pub(crate) unsafe fn room<T: AbiStruct>(place: *const T) -> Result<(), Error> {
    // SAFETY: as of this function.
    let size = unsafe { read(place)? }.size();
    if size < T::LAYOUT.bytes {
        let text = format!("a {} of {size} bytes has no room for the answer", T::LAYOUT.name);
        return Err(Error::invalid(text));
    }
    Ok(())
}

/// # Safety
/// `from` is NULL or `len` elements that can be read and that nobody writes for `'a`.
unsafe fn items<'a, T>(from: *const T, len: u64, what: &str) -> Result<&'a [T], Error> {
    let len = size(len, what)?;
    if len == 0 {
        return Ok(&[]);
    }
    let fits = len.checked_mul(size_of::<T>()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    if from.is_null() || !from.is_aligned() || !fits {
        return Err(Error::invalid(format!("{len} {what} do not lie where the host says")));
    }
    // SAFETY: not NULL, aligned, not too many, and the caller vouches for the rest.
    Ok(unsafe { slice::from_raw_parts(from, len) })
}

/// # Safety
/// As for [`items`].
pub(crate) unsafe fn bytes<'a>(from: *const c_void, len: u64, what: &str) -> Result<&'a [u8], Error> {
    // SAFETY: as of this function.
    unsafe { items(from.cast(), len, what) }
}

/// # Safety
/// As for [`items`].
unsafe fn text<'a>(from: *const c_char, len: u64, what: &str) -> Result<&'a str, Error> {
    // SAFETY: as of this function.
    let bytes = unsafe { bytes(from.cast(), len, what)? };
    str::from_utf8(bytes).map_err(|_| Error::invalid(format!("the {what} are not UTF-8")))
}

/// # Safety
/// `from` is NULL, for no options, or a struct of the host.
pub(crate) unsafe fn options(from: *const NpOptions) -> Result<Options, Error> {
    if from.is_null() {
        return Ok(Options::default());
    }
    // SAFETY: the host vouches for the struct, the array and each element.
    unsafe {
        let options = read(from)?;
        if options.count > MOST_OPTIONS {
            return Err(Error::invalid(format!("{} options are too many", options.count)));
        }
        let each = items(options.items, options.count, "options")?.iter().map(|item| {
            let item: NpOption = read(*item)?;
            let key = text(item.key, item.key_bytes, "bytes of a key")?;
            let value = text(item.value, item.value_bytes, "bytes of a value")?;
            Ok((key.to_string(), value.to_string()))
        });
        each.collect()
    }
}

/// # Safety
/// `from` is NULL or a struct of the host, whose bytes live for `'a`.
unsafe fn matrix<'a>(from: *const NpMatrix) -> Result<Matrix<'a>, Error> {
    // SAFETY: the host vouches for the struct and for the bytes.
    unsafe {
        let m: NpMatrix = read(from)?;
        let scheme = scheme(m.scheme)?;
        if m.group != scheme.group() as u64 {
            return Err(Error::unsupported(format!(
                "groups of {} columns: they have {}",
                m.group,
                scheme.group()
            )));
        }
        let (rows, cols) = (size(m.rows, "rows")?, size(m.cols, "columns")?);
        // The counts are compared with the shape before anything is borrowed of that length.
        let found = [m.data_bytes, m.scales_bytes, m.mins_bytes];
        let want = scheme.bytes(rows, cols).filter(|_| rows > 0 && cols > 0);
        if want.map(|want| want.map(|bytes| bytes as u64)) != Some(found) {
            let text = format!(
                "a {rows} x {cols} matrix of {} has {want:?} bytes of data, scales and minima, not {found:?}",
                scheme.name()
            );
            return Err(Error::invalid(text));
        }
        let outliers = match m.outlier_count {
            0 => None,
            count if count > m.cols || scheme != Scheme::Channel4 => {
                let text = format!("{count} outliers in {cols} columns of {}", scheme.name());
                return Err(Error::invalid(text));
            }
            count => Some(Outliers {
                columns: items(m.outlier_columns, count, "outlier columns")?,
                data: bytes(m.outlier_data, m.rows.saturating_mul(count), "bytes of outliers")?,
                scales: bytes(m.outlier_scales, m.rows.saturating_mul(4), "bytes of outlier scales")?,
            }),
        };
        let matrix = Matrix {
            scheme,
            rows,
            cols,
            data: bytes(m.data, m.data_bytes, "bytes of data")?,
            scales: bytes(m.scales, m.scales_bytes, "bytes of scales")?,
            mins: bytes(m.mins, m.mins_bytes, "bytes of minima")?,
            outliers,
        };
        matrix.check()?;
        Ok(matrix)
    }
}

fn scheme(number: u32) -> Result<Scheme, Error> {
    let scheme = Scheme::from_number(number);
    scheme.ok_or_else(|| Error::unsupported(format!("this plugin does not know scheme {number}")))
}

pub(crate) fn stage(number: u32) -> Result<Stage, Error> {
    let stage = Stage::from_number(number);
    stage.ok_or_else(|| Error::unsupported(format!("this plugin does not know stage {number}")))
}

pub(crate) fn activation(number: u32) -> Result<ActivationKind, Error> {
    let kind = ActivationKind::from_number(number);
    kind.ok_or_else(|| Error::unsupported(format!("this plugin does not know activation {number}")))
}

/// # Safety
/// `from` is NULL or a struct of the host, whose bytes live for `'a`.
pub(crate) unsafe fn weight_source<'a>(from: *const NpWeightSource) -> Result<WeightSource<'a>, Error> {
    // SAFETY: the host vouches for the struct and what it names.
    unsafe {
        let source: NpWeightSource = read(from)?;
        let name = text(source.name, source.name_bytes, "bytes of a name")?;
        let block = [source.gate, source.up, source.down];
        let matrices = match (source.matrix.is_null(), block.map(|part| part.is_null())) {
            (false, [true, true, true]) => Matrices::One(matrix(source.matrix)?),
            (true, [false, false, false]) => Matrices::Neurons {
                gate: matrix(source.gate)?,
                up: matrix(source.up)?,
                down: matrix(source.down)?,
            },
            _ => return Err(Error::invalid("a weight is one matrix, or gate, up and down")),
        };
        Ok(WeightSource { name, matrices })
    }
}

/// # Safety
/// `from` is NULL or a struct of the host.
pub(crate) unsafe fn query(from: *const NpQuery) -> Result<(Query, u64), Error> {
    // SAFETY: as of this function.
    let q: NpQuery = unsafe { read(from)? };
    let scheme_of_weight = scheme(q.scheme)?;
    let group_of = |scheme: Scheme| match scheme.group() as u64 {
        0 => Ok(()),
        group if group == q.group => Ok(()),
        group => Err(Error::unsupported(format!("groups of {} columns: they have {group}", q.group))),
    };
    group_of(scheme_of_weight)?;
    let (rows, cols, tokens) = (size(q.rows, "rows")?, size(q.cols, "columns")?, size(q.tokens, "tokens")?);
    let query = match q.op {
        neuropil_plugin_abi::NP_OP_MATMUL => Query::Matmul { scheme: scheme_of_weight, rows, cols, tokens },
        neuropil_plugin_abi::NP_OP_CLUSTER => {
            let down_scheme = scheme(q.down_scheme)?;
            group_of(down_scheme)?;
            let (stage, activation) = (stage(q.stage)?, activation(q.activation)?);
            let (neurons, width) = (rows, cols);
            Query::Cluster {
                scheme: scheme_of_weight,
                down_scheme,
                stage,
                activation,
                neurons,
                width,
                tokens,
            }
        }
        op => return Err(Error::unsupported(format!("this plugin does not know operation {op}"))),
    };
    Ok((query, q.tokens))
}

/// # Safety
/// `from` is NULL or a struct of the host.
pub(crate) unsafe fn region(from: *const NpRegion, kinds: u32, alignment: u64) -> Result<Region, Error> {
    // SAFETY: as of this function.
    let r: NpRegion = unsafe { read(from)? };
    if r.kind.count_ones() != 1 || r.kind & kinds == 0 {
        return Err(Error::unsupported(format!("memory of kind {}: this unit imports {kinds} only", r.kind)));
    }
    let alignment = alignment.max(1);
    let aligned = (r.host.addr() as u64).is_multiple_of(alignment) && r.bytes.is_multiple_of(alignment);
    if r.bytes == 0 || !aligned || r.kind == neuropil_plugin_abi::NP_MEMORY_HOST && r.host.is_null() {
        let text =
            format!("{} bytes at {:?} cannot be imported: it takes {alignment} alignment", r.bytes, r.host);
        return Err(Error::invalid(text));
    }
    let (offset, bytes) = (size(r.offset, "bytes before a region")?, size(r.bytes, "bytes of a region")?);
    Ok(Region { kind: r.kind, host: r.host, native: r.native, fd: r.fd, offset, bytes })
}

/// Where a buffer of a job lies. What it borrows outlives the job.
pub(crate) struct Values {
    pub data: *mut f32,
    pub len: usize,
    memory: Option<(std::sync::Arc<Imported>, usize)>,
}

impl Values {
    /// Checks that a buffer has `len` values.
    ///
    /// # Safety
    /// `from` is NULL or a struct of the host.
    pub unsafe fn new(
        from: *const NpBuffer,
        len: Option<usize>,
        memories: &Handles<Imported>,
        what: &str,
    ) -> Result<Values, Error> {
        // SAFETY: as of this function.
        let buffer: NpBuffer = unsafe { read(from)? };
        let needed = len.and_then(|len| len.checked_mul(size_of::<f32>()));
        let needed = needed.filter(|bytes| isize::try_from(*bytes).is_ok());
        let (Some(len), Some(needed)) = (len, needed) else {
            return Err(Error::invalid(format!("{what} would be too large")));
        };
        let data = buffer.data.cast::<f32>();
        if buffer.bytes < needed as u64 || data.is_null() || !data.is_aligned() {
            let text = format!("{what} has {} bytes at {data:?}, but the job needs {needed}", buffer.bytes);
            return Err(Error::invalid(text));
        }
        let memory = match buffer.memory.is_null() {
            true => None,
            false => {
                let memory = memories.get(buffer.memory, "imported memory")?;
                let offset = size(buffer.memory_offset, "bytes before a buffer")?;
                if offset.checked_add(needed).is_none_or(|end| end > memory.bytes) {
                    return Err(Error::invalid(format!("{what} does not lie in its memory")));
                }
                Some((memory, offset))
            }
        };
        Ok(Values { data, len, memory })
    }

    /// Whether two buffers have a byte in common.
    pub fn overlaps(&self, other: &Values) -> bool {
        let start = |v: &Values| v.data.addr();
        let end = |v: &Values| v.data.addr().saturating_add(v.len * size_of::<f32>());
        start(self) < end(other) && start(other) < end(self)
    }

    fn placed(&self) -> Option<Placed<'_>> {
        self.memory.as_ref().map(|(memory, offset)| Placed { memory: &*memory.memory, offset: *offset })
    }

    /// # Safety
    /// The host's buffer can be read, and nobody writes it meanwhile.
    pub unsafe fn input(&self) -> Input<'_> {
        // SAFETY: not NULL, aligned and not too long, as checked; the caller vouches for the rest.
        Input { values: unsafe { slice::from_raw_parts(self.data, self.len) }, placed: self.placed() }
    }

    /// # Safety
    /// The host's buffer can be written, and nobody else reads or writes it meanwhile.
    pub unsafe fn output(&self) -> Output<'_> {
        // SAFETY: not NULL, aligned and not too long, as checked; the caller vouches for the rest.
        Output { values: unsafe { slice::from_raw_parts_mut(self.data, self.len) }, placed: self.placed() }
    }
}
