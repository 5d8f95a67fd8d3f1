//! Results against the same sums in F64.

use neuropil_nnapi_shim::codes::*;

use crate::kit::*;

/// `x w + b` in F64, row by row.
fn wanted(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let k = w.len() / b.len();
    let row = |x: &[f64]| {
        let dot = |w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
        w.chunks(k).zip(b).map(|(w, b)| dot(w) + b).collect::<Vec<f64>>()
    };
    x.chunks(k).flat_map(row).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (at, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*g) - w).abs() <= tolerance, "{at}: {g} is not {w}");
    }
}

#[test]
fn floats_are_right_and_fused() {
    let _one = alone();
    let (x, w, b) = (noise(3, 4 * 64), noise(1, 32 * 64), noise(2, 32));
    for (fuse, low, high) in [(0, -1e9, 1e9), (1, 0.0, 1e9), (2, -1.0, 1.0), (3, 0.0, 6.0)] {
        let net = linear(4, 64, 32, fuse).compile();
        let (code, y) = net.run(&bytes_of(&x), 4 * 32 * 4);
        assert_eq!(code, NO_ERROR);
        let want =
            wanted(&wide(&x), &wide(&w), &wide(&b)).iter().map(|v| v.clamp(low, high)).collect::<Vec<_>>();
        close(&floats(&y), &want, 1e-4);
    }
    assert_eq!((query("violations"), query("refused"), query("live")), (0, 0, 0));
}

#[test]
fn halves_are_rounded_to_halves() {
    let _one = alone();
    let (x, w, b) = (halves_of(&noise(3, 2 * 40)), halves_of(&noise(1, 8 * 40)), halves_of(&noise(2, 8)));
    let mut net = Net::new();
    let i = net.operand((TENSOR_FLOAT16, &[2, 40], 0.0, 0));
    let wi = net.constant((TENSOR_FLOAT16, &[8, 40], 0.0, 0), w.clone());
    let bi = net.constant((TENSOR_FLOAT16, &[8], 0.0, 0), b.clone());
    let f = net.number(0);
    let o = net.operand((TENSOR_FLOAT16, &[2, 8], 0.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[i, wi, bi, f], &[o]), NO_ERROR);
    assert_eq!(net.io(&[i], &[o]), NO_ERROR);
    let net = net.compile();
    let (code, y) = net.run(&x, 2 * 8 * 2);
    assert_eq!(code, NO_ERROR);
    close(&halves(&y), &wanted(&wide(&halves(&x)), &wide(&halves(&w)), &wide(&halves(&b))), 5e-3);
}

#[test]
fn relaxed_floats_are_as_coarse_as_halves() {
    let _one = alone();
    let x = noise(3, 2 * 64);
    let mut relaxed = linear(2, 64, 8, 0);
    relaxed.relax();
    let (relaxed, exact) = (relaxed.compile(), linear(2, 64, 8, 0).compile());
    let (_, y) = relaxed.run(&bytes_of(&x), 2 * 8 * 4);
    let (_, z) = exact.run(&bytes_of(&x), 2 * 8 * 4);
    let (y, z) = (floats(&y), floats(&z));
    assert_ne!(y, z);
    close(&y, &wide(&z), 0.02);
    assert_eq!(halves(&halves_of(&y)), y, "each result fits a half");
}

/// Quantised products of either signedness.
fn quantised(kind: i32, zero_x: i32, zero_w: i32, zero_y: i32) {
    let code = |v: f32, low: i32| ((v + 1.0) * 127.5) as i32 + low;
    let low = if kind == TENSOR_QUANT8_ASYMM { 0 } else { -128 };
    let codes = |seed, n| noise(seed, n).iter().map(|v| code(*v, low)).collect::<Vec<i32>>();
    let (x, w) = (codes(3, 3 * 50), codes(1, 6 * 50));
    let b: Vec<i32> = noise(2, 6).iter().map(|v| (v * 4000.0) as i32).collect();
    let (sx, sw, sy) = (0.02f32, 0.01f32, 0.05f32);
    let bytes = |v: &[i32]| v.iter().map(|v| *v as u8).collect::<Vec<u8>>();
    for fuse in [0, 1] {
        let mut net = Net::new();
        let i = net.operand((kind, &[3, 50], sx, zero_x));
        let wi = net.constant((kind, &[6, 50], sw, zero_w), bytes(&w));
        let bi = net.constant((TENSOR_INT32, &[6], sx * sw, 0), words_of(&b));
        let f = net.number(fuse);
        let o = net.operand((kind, &[3, 6], sy, zero_y));
        assert_eq!(net.operation(FULLY_CONNECTED, &[i, wi, bi, f], &[o]), NO_ERROR);
        assert_eq!(net.io(&[i], &[o]), NO_ERROR);
        let net = net.compile();
        let (rc, y) = net.run(&bytes(&x), 3 * 6);
        assert_eq!(rc, NO_ERROR);
        let real = |v: &[i32], zero: i32, s: f32| -> Vec<f64> {
            v.iter().map(|q| f64::from(q - zero) * f64::from(s)).collect()
        };
        let want = wanted(&real(&x, zero_x, sx), &real(&w, zero_w, sw), &real(&b, 0, sx * sw));
        let least = if fuse == 1 { zero_y } else { low };
        for (got, want) in y.iter().zip(want) {
            let got = if low == 0 { i32::from(*got) } else { i32::from(got.cast_signed()) };
            let want = (want / f64::from(sy)).round() as i32 + zero_y;
            assert!((got - want.clamp(least, low + 255)).abs() <= 1, "{got} is not {want}");
        }
    }
}

#[test]
fn bytes_are_right() {
    let _one = alone();
    quantised(TENSOR_QUANT8_ASYMM, 120, 130, 100);
    quantised(TENSOR_QUANT8_ASYMM_SIGNED, 3, 0, -7);
}

#[test]
fn a_product_per_channel_is_a_convolution() {
    let _one = alone();
    let (m, k, n) = (3usize, 40usize, 5usize);
    let scales: Vec<f32> = (0..n).map(|c| 0.004 * (c + 1) as f32).collect();
    let codes = |seed, n| noise(seed, n).iter().map(|v| (v * 127.0) as i8).collect::<Vec<i8>>();
    let (x, w) = (codes(3, m * k), codes(1, n * k));
    let b: Vec<i32> = noise(2, n).iter().map(|v| (v * 900.0) as i32).collect();
    let (sx, sy, zx) = (0.03f32, 0.1f32, 9);
    let bytes = |v: &[i8]| v.iter().map(|v| v.cast_unsigned()).collect::<Vec<u8>>();
    let mut net = Net::new();
    let i = net.operand((TENSOR_QUANT8_ASYMM_SIGNED, &[1, 3, 1, 40], sx, zx));
    let wi = net.constant((TENSOR_QUANT8_SYMM_PER_CHANNEL, &[5, 1, 1, 40], 0.0, 0), bytes(&w));
    assert_eq!(net.channels(wi, 0, &scales), NO_ERROR);
    let bi = net.constant((TENSOR_INT32, &[5], 0.0, 0), words_of(&b));
    let arguments: Vec<u32> = [0, 0, 0, 0, 1, 1, 0].iter().map(|v| net.number(*v)).collect();
    let o = net.operand((TENSOR_QUANT8_ASYMM_SIGNED, &[1, 3, 1, 5], sy, 0));
    assert_eq!(net.operation(CONV_2D, &[&[i, wi, bi], arguments.as_slice()].concat(), &[o]), NO_ERROR);
    assert_eq!(net.io(&[i], &[o]), NO_ERROR);
    let net = net.compile();
    let (rc, y) = net.run(&bytes(&x), m * n);
    assert_eq!(rc, NO_ERROR);
    for (at, got) in y.iter().enumerate() {
        let (row, channel) = (at / n, at % n);
        let dot: f64 =
            (0..k).map(|j| f64::from(i32::from(x[row * k + j]) - zx) * f64::from(w[channel * k + j])).sum();
        let want = (dot + f64::from(b[channel])) * f64::from(sx) * f64::from(scales[channel]) / f64::from(sy);
        let want = want.round().clamp(-128.0, 127.0) as i32;
        assert!((i32::from(got.cast_signed()) - want).abs() <= 1, "{at}: {got} is not {want}");
    }
    assert_eq!((query("violations"), query("refused")), (0, 0));
}

/// A convolution with a window, by the book.
#[test]
fn windows_with_padding_and_strides_are_right() {
    let _one = alone();
    let (h, w, d, out) = (5usize, 6usize, 2usize, 3usize);
    let (x, f, b) = (noise(3, h * w * d), noise(1, out * 9 * d), noise(2, out));
    for implicit in [false, true] {
        let mut net = Net::new();
        let i = net.operand((TENSOR_FLOAT32, &[1, 5, 6, 2], 0.0, 0));
        let wi = net.constant((TENSOR_FLOAT32, &[3, 3, 3, 2], 0.0, 0), bytes_of(&f));
        let bi = net.constant((TENSOR_FLOAT32, &[3], 0.0, 0), bytes_of(&b));
        // Left, right, top, bottom, strides, fuse; or the scheme that gives the same padding here.
        let list: &[i32] = if implicit { &[1, 2, 2, 0] } else { &[0, 1, 1, 1, 2, 2, 0] };
        let arguments: Vec<u32> = list.iter().map(|v| net.number(*v)).collect();
        let o = net.operand((TENSOR_FLOAT32, &[1, 3, 3, 3], 0.0, 0));
        assert_eq!(net.operation(CONV_2D, &[&[i, wi, bi], arguments.as_slice()].concat(), &[o]), NO_ERROR);
        assert_eq!(net.io(&[i], &[o]), NO_ERROR);
        let net = net.compile();
        let (rc, y) = net.run(&bytes_of(&x), 3 * 3 * 3 * 4);
        assert_eq!(rc, NO_ERROR);
        let mut want = Vec::new();
        for (row, column, channel) in (0..27).map(|n| (n / 9, n / 3 % 3, n % 3)) {
            let mut sum = f64::from(b[channel]);
            for (ty, tx, c) in (0..18).map(|n| (n / 6, n / 2 % 3, n % 2)) {
                let (py, px) = (row * 2 + ty, column * 2 + tx);
                if (1..=h).contains(&py) && px < w {
                    let pixel = ((py - 1) * w + px) * d + c;
                    sum += f64::from(x[pixel]) * f64::from(f[((channel * 3 + ty) * 3 + tx) * d + c]);
                }
            }
            want.push(sum);
        }
        close(&floats(&y), &want, 1e-5);
    }
}

#[test]
fn a_gate_of_three_operations_is_right() {
    let _one = alone();
    let (x, w, b) = (noise(3, 2 * 16), noise(1, 4 * 16), noise(2, 4));
    let mut net = Net::new();
    let t: Type = (TENSOR_FLOAT32, &[2, 4], 0.0, 0);
    let i = net.operand((TENSOR_FLOAT32, &[2, 16], 0.0, 0));
    let wi = net.constant((TENSOR_FLOAT32, &[4, 16], 0.0, 0), bytes_of(&w));
    let bi = net.constant((TENSOR_FLOAT32, &[4], 0.0, 0), bytes_of(&b));
    let f = net.number(0);
    let one = net.constant((TENSOR_FLOAT32, &[1], 0.0, 0), bytes_of(&[1.0]));
    let [a, s, p, o] = [net.operand(t), net.operand(t), net.operand(t), net.operand(t)];
    // Not in the order in which they can run.
    assert_eq!(net.operation(ADD, &[p, one, f], &[o]), NO_ERROR);
    assert_eq!(net.operation(MUL, &[a, s, f], &[p]), NO_ERROR);
    assert_eq!(net.operation(LOGISTIC, &[a], &[s]), NO_ERROR);
    assert_eq!(net.operation(FULLY_CONNECTED, &[i, wi, bi, f], &[a]), NO_ERROR);
    assert_eq!(net.io(&[i], &[o]), NO_ERROR);
    let net = net.compile();
    let (rc, y) = net.run(&bytes_of(&x), 2 * 4 * 4);
    assert_eq!(rc, NO_ERROR);
    let want = wanted(&wide(&x), &wide(&w), &wide(&b))
        .iter()
        .map(|v| v / (1.0 + (-v).exp()) + 1.0)
        .collect::<Vec<_>>();
    close(&floats(&y), &want, 1e-5);
}
