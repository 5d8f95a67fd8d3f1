//! Where inputs and outputs lie: at any address that is a multiple of 4, in buffers that are larger than the job needs, in
//! memory that was imported.

use neuropil_plugin_abi::{self as abi, AbiStruct, NpBuffer, NpMatmulJob, NpProduct, NpRegion, NpReport};

use super::{Values, check_product, least, multiply, plain, prepared, product_of};
use crate::border::Border;
use crate::bounds;
use crate::case::{Cases, Ended, Found, Stop, compare, ensure};
use crate::raw::{BREACH, Failure, MARK, Memory};
use crate::sample::{Fill, Kind};
use crate::subject::Subject;

pub fn cases<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    for kind in border.kinds() {
        let scheme = kind.name();
        for (x, y) in [(0, 0), (4, 4), (8, 20), (12, 44), (36, 60)] {
            let id = format!("buffer/address/{scheme}/x{x}-y{y}");
            cases.add(id, move || placed(border, kind, Places { x, y, ..Places::default() }));
        }
        for (name, x, y) in [("input", 64, 0), ("output", 0, 64), ("both", 4, 4), ("far", 4096, 8192)] {
            let id = format!("buffer/roomy/{scheme}/{name}");
            cases.add(id, move || placed(border, kind, Places { x_room: x, y_room: y, ..Places::default() }));
        }
        for (name, x, y) in [("input", true, false), ("output", false, true), ("both", true, true)] {
            for (at, offset) in [("start", 0), ("offset", 256)] {
                let places = Places { x: offset, y: offset, ..Places::default() };
                let id = format!("buffer/imported/{scheme}/{name}-at-{at}");
                cases.add(id, move || imported(border, kind, places, (x, y)));
            }
        }
        cases.add(format!("buffer/report/{scheme}"), move || report(border, kind));
        cases.add(format!("buffer/several-jobs/{scheme}"), move || several_jobs(border, kind));
    }
    for name in
        ["a-kind-that-there-is-not", "two-kinds-at-once", "no-bytes", "no-memory", "between-addresses"]
    {
        cases.add(format!("buffer/import-refused/{name}"), move || import_refused(border, name));
    }
    cases.add("buffer/import-again".into(), move || import_again(border));
}

/// Offsets in bytes of x and y from addresses that are a multiple of 4096, and bytes behind them.
#[derive(Clone, Copy, Default)]
struct Places {
    x: usize,
    y: usize,
    x_room: usize,
    y_room: usize,
}

const PAGE: usize = 4096;

/// Pages of values; what is not used are marks.
struct Pages {
    values: Vec<f32>,
    first: usize,
    pages: usize,
}

impl Pages {
    fn new(bytes: usize, alignment: usize) -> Pages {
        let alignment = alignment.clamp(PAGE, 1 << 24);
        let pages = bytes.div_ceil(alignment) * alignment;
        let values = vec![MARK; (pages + alignment) / 4];
        let address = values.as_ptr().addr();
        let first = (address.next_multiple_of(alignment) - address) / 4;
        Pages { values, first, pages }
    }

    fn part(&mut self, offset: usize, len: usize) -> &mut [f32] {
        let start = self.first + offset / 4;
        &mut self.values[start..start + len]
    }

    /// Whether there are marks everywhere but in one part.
    fn is_marked(&self, offset: usize, len: usize) -> bool {
        let start = self.first + offset / 4;
        let outside = self.values[..start].iter().chain(&self.values[start + len..]);
        outside.map(|value| value.to_bits()).all(|bits| bits == MARK.to_bits())
    }

    fn buffer(&mut self, offset: usize, bytes: usize) -> NpBuffer {
        let data = self.values.as_mut_ptr().wrapping_add(self.first).cast::<u8>().wrapping_add(offset).cast();
        NpBuffer { data, bytes: bytes as u64, ..NpBuffer::new() }
    }

    fn region(&mut self) -> NpRegion {
        let host = self.values.as_mut_ptr().wrapping_add(self.first).cast();
        let kind = abi::NP_MEMORY_HOST;
        NpRegion { kind, host, fd: -1, bytes: self.pages as u64, ..NpRegion::new() }
    }
}

/// Imports pages, if the unit takes them.
fn import<'a>(border: &'a Border, pages: &mut Pages) -> Result<Memory<'a>, Stop> {
    takes_host_memory(border)?;
    let region = pages.region();
    border.device.import(&region).map_err(|failure| Stop::failed("import_memory", &failure))
}

fn takes_host_memory(border: &Border) -> Result<usize, Stop> {
    let info = border.device.try_info().map_err(|failure| Stop::failed("info", &failure))?;
    if info.memory_kinds & abi::NP_MEMORY_HOST == 0 {
        return Err(Stop::Unsupported("the unit imports no memory of the process".into()));
    }
    Ok(usize::try_from(info.memory_alignment).unwrap_or(PAGE))
}

fn placed(border: &Border, kind: Kind, places: Places) -> Ended {
    run(border, kind, places, PAGE, |_, _, _| Ok([None, None])).map(|(found, _)| found)
}

/// A product between places of pages, of which some are imported.
fn run<'a>(
    border: &'a Border,
    kind: Kind,
    places: Places,
    alignment: usize,
    import: impl FnOnce(&'a Border, &mut Pages, &mut Pages) -> Result<[Option<Memory<'a>>; 2], Stop>,
) -> Result<(Found, NpReport), Stop> {
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let input = Values::Random.input(tokens, sample.cols, 7);
    let (x_len, y_len) = (input.len(), tokens * sample.rows);
    let mut x = Pages::new(places.x + x_len * 4 + places.x_room, alignment);
    let mut y = Pages::new(places.y + y_len * 4 + places.y_room, alignment);
    x.part(places.x, x_len).copy_from_slice(&input);
    y.part(places.y, y_len).fill(f32::NAN);
    let [x_memory, y_memory] = import(border, &mut x, &mut y)?;
    let mut x_buffer = x.buffer(places.x, x_len * 4 + places.x_room);
    let mut y_buffer = y.buffer(places.y, y_len * 4 + places.y_room);
    for (buffer, memory, offset) in
        [(&mut x_buffer, &x_memory, places.x), (&mut y_buffer, &y_memory, places.y)]
    {
        if let Some(memory) = memory {
            (buffer.memory, buffer.memory_offset) = (memory.handle(), offset as u64);
        }
    }
    let product = NpProduct { weight: weight.handle(), y: &y_buffer, ..NpProduct::new() };
    let list = [&raw const product];
    let job = NpMatmulJob {
        tokens: tokens as u64,
        x: &x_buffer,
        products: list.as_ptr(),
        product_count: 1,
        ..NpMatmulJob::new()
    };
    let report = border.device.matmul_job(&job).map_err(|failure| Stop::failed("matmul", &failure))?;
    drop((x_memory, y_memory));
    let same = x.part(places.x, x_len).iter().zip(&input).all(|(is, was)| is.to_bits() == was.to_bits());
    ensure(same, || "x, an input of the job, was written".into())?;
    ensure(x.is_marked(places.x, x_len), || "values beside the input were written".into())?;
    ensure(y.is_marked(places.y, y_len), || "values beside the output were written".into())?;
    let found = y.part(places.y, y_len).to_vec();
    Ok((compare(&product_of(&sample, &input), &found, bounds::product(kind))?, report))
}

fn imported(border: &Border, kind: Kind, places: Places, (of_x, of_y): (bool, bool)) -> Ended {
    let alignment = takes_host_memory(border)?;
    let found = run(border, kind, places, alignment, |border, x, y| {
        let x = if of_x { Some(import(border, x)?) } else { None };
        let y = if of_y { Some(import(border, y)?) } else { None };
        Ok([x, y])
    });
    found.map(|(found, _)| found)
}

/// The report of a job has no flags that the header does not know.
fn report(border: &Border, kind: Kind) -> Ended {
    let (found, report) = run(border, kind, Places::default(), PAGE, |_, _, _| Ok([None, None]))?;
    let known = abi::NP_REPORT_ZERO_COPY_INPUT | abi::NP_REPORT_ZERO_COPY_OUTPUT;
    ensure(report.flags & !known == 0, || format!("the report has the flags {}", report.flags))?;
    Ok(found)
}

/// Jobs one after the other leave the outputs of those before alone.
fn several_jobs(border: &Border, kind: Kind) -> Ended {
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let tokens = least(border);
    let inputs: Vec<Vec<f32>> = (0..4).map(|seed| Values::Random.input(tokens, sample.cols, seed)).collect();
    let mut outputs = Vec::new();
    for x in &inputs {
        outputs.extend(multiply(border, &[&weight], x, tokens)?);
    }
    let mut found = Found::default();
    for (x, y) in inputs.iter().zip(&outputs) {
        found = compare(&product_of(&sample, x), y, bounds::product(kind))?;
    }
    Ok(found)
}

/// Regions that cannot be.
fn import_refused(border: &Border, name: &str) -> Ended {
    if border.device.table().import_memory.is_none() {
        return Err(Stop::Unsupported("the plugin does not offer importing memory".into()));
    }
    let info = border.device.try_info().map_err(|failure| Stop::failed("info", &failure))?;
    let mut pages = Pages::new(PAGE, PAGE);
    let good = pages.region();
    let region = match name {
        "a-kind-that-there-is-not" => NpRegion { kind: 1 << 20, ..good },
        "two-kinds-at-once" => NpRegion { kind: good.kind | abi::NP_MEMORY_DMA_BUF, ..good },
        "no-bytes" => NpRegion { bytes: 0, ..good },
        "no-memory" => NpRegion { host: std::ptr::null_mut(), ..good },
        _ if info.memory_alignment <= 1 => {
            return Err(Stop::Unsupported("the unit takes memory at any address".into()));
        }
        _ => NpRegion { host: good.host.cast::<u8>().wrapping_add(1).cast(), bytes: good.bytes - 8, ..good },
    };
    match border.device.import(&region) {
        Err(Failure { code: BREACH, text }) => Err(Stop::wrong(text)),
        Err(_) => Ok(Found::default()),
        Ok(_) => Err(Stop::wrong("it is not refused")),
    }
}

/// Memory can be imported again after it was given back, and twice at once is no mistake either.
fn import_again(border: &Border) -> Ended {
    let mut pages = Pages::new(4 * PAGE, takes_host_memory(border)?);
    for _ in 0..8 {
        drop(import(border, &mut pages)?);
    }
    let kind = super::errors::offered(border)?;
    let mut other = Pages::new(4 * PAGE, takes_host_memory(border)?);
    let memories = [import(border, &mut pages)?, import(border, &mut other)?];
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let found = check_product(border, kind, (&weight, &sample), least(border), 1);
    drop(memories);
    found
}
