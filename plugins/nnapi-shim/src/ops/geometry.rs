//! Images as rows: each window of a convolution becomes one row, in the order of the filter's elements.

use crate::check::Window;
use crate::codes::*;

/// The windows of an image `[n, height, width, depth]` under a filter `[out, height, width, depth]`.
pub(super) fn rows<T: Copy>(
    image: &[T],
    dims: &[u32],
    filter: &[u32],
    window: Window,
    outside: T,
) -> Outcome<Vec<T>> {
    let ([n, height, width, depth], [_, fh, fw, _]) = (dims, filter) else { return Err(OP_FAILED) };
    let (top, rows) = window.along(0, *height, *fh)?;
    let (left, columns) = window.along(1, *width, *fw)?;
    let [height, width, depth] = [*height, *width, *depth].map(|d| d as usize);
    let mut out = Vec::new();
    let elements = [*n, rows, columns, *fh, *fw].iter().try_fold(depth, |p, d| p.checked_mul(*d as usize));
    out.try_reserve_exact(elements.ok_or(OP_FAILED)?).map_err(|_| OP_FAILED)?;
    let place = |at: u32, stride: u32, tap: u32, dilation: u32, before: u32, size: usize| {
        let at = u64::from(at) * u64::from(stride) + u64::from(tap) * u64::from(dilation);
        at.checked_sub(u64::from(before)).map(|p| p as usize).filter(|p| *p < size)
    };
    for picture in image.chunks_exact(height * width * depth) {
        for row in 0..rows {
            for column in 0..columns {
                for tap_y in 0..*fh {
                    let y = place(row, window.stride.0, tap_y, window.dilation.0, top, height);
                    for tap_x in 0..*fw {
                        let x = place(column, window.stride.1, tap_x, window.dilation.1, left, width);
                        let pixel = y.zip(x).map(|(y, x)| (y * width + x) * depth);
                        match pixel.and_then(|at| picture.get(at..at + depth)) {
                            Some(pixel) => out.extend_from_slice(pixel),
                            None => out.extend(std::iter::repeat_n(outside, depth)),
                        }
                    }
                }
            }
        }
    }
    Ok(out)
}
