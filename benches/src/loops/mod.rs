//! Loops that do one thing as fast as the machine can: read memory, or multiply and add in registers.
//!
//! The only code of the benches that needs intrinsics. A loop is handed out only where the machine has its
//! instructions, so running it is safe.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

/// Bytes of a chunk to read must be a multiple of this.
pub const READ_UNIT: usize = 64 << 10;

/// Bytes that neighbouring streams are apart when they are near: what the hardware's own prefetch does not cross.
const PAGE: usize = 4096;

/// The order in which a chunk is read.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Places that are read in turn: 1, 2, 4 or 8.
    pub streams: usize,
    /// Whether the places lie a whole share of the chunk apart and not a page.
    pub far: bool,
    /// Bytes that a prefetch is ahead of a read; 0 for none.
    pub ahead: usize,
}

/// A loop that reads.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// What it loads with.
    pub name: &'static str,
    run: fn(&[u8], Order),
}

impl Reader {
    /// Reads all of `bytes` once.
    ///
    /// # Panics
    /// When the length is no multiple of [`READ_UNIT`].
    pub fn read(&self, bytes: &[u8], order: Order) {
        assert!(bytes.len().is_multiple_of(READ_UNIT), "{} bytes are no whole units", bytes.len());
        (self.run)(bytes, order);
    }
}

/// A loop that computes in registers.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    /// The instruction.
    pub name: &'static str,
    /// What is multiplied: `f32`, `int8` or `bf16`.
    pub values: &'static str,
    /// Multiplications and additions in a step.
    pub operations: usize,
    run: fn(usize),
}

impl Arithmetic {
    /// Does some steps.
    pub fn run(&self, steps: usize) {
        (self.run)(steps);
    }
}

/// The readers of this machine, the widest last.
pub fn readers() -> Vec<Reader> {
    let mut all = vec![Reader { name: "8-byte loads", run: plain }];
    #[cfg(target_arch = "x86_64")]
    all.extend(x86_64::readers());
    #[cfg(target_arch = "aarch64")]
    all.extend(aarch64::readers());
    all
}

/// The arithmetic of this machine; what the compiler makes of a loop where nothing better is known.
pub fn arithmetic() -> Vec<Arithmetic> {
    let mut all = Vec::new();
    #[cfg(target_arch = "x86_64")]
    all.extend(x86_64::arithmetic());
    #[cfg(target_arch = "aarch64")]
    all.extend(aarch64::arithmetic());
    if all.is_empty() {
        all.push(Arithmetic { name: "compiled", values: "f32", operations: 2 * 64, run: plain_f32 });
    }
    all
}

/// As the compiler makes it for any machine; the order is its own.
fn plain(bytes: &[u8], _: Order) {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum ^= u64::from_ne_bytes(*word);
        }
    }
    std::hint::black_box(sums);
}

fn plain_f32(steps: usize) {
    let (a, b) = std::hint::black_box((0.5f32, 0.25f32));
    let mut sums = std::hint::black_box([0f32; 64]);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = *sum * a + b;
        }
    }
    std::hint::black_box(sums);
}
