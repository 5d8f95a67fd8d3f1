//! Kinds of files: experts in both forms, PowerInfer's, what cannot be converted, and the store of version 1 that was
//! committed.

use std::path::Path;
use std::process::Command;

use neuropil::gguf::Gguf;
use neuropil::store::{ConvertError, ConvertOptions, Store};
use neuropil_device::DType;
use neuropil_tests::codec;
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::Toy;

use crate::bits::neuron;
use crate::reading::{Reading, bits};
use crate::{convert, toy};

const WIDTH: u64 = 64;
const NEURONS: u64 = 96;
const EXPERTS: u64 = 3;

/// A file with one layer and nothing else.
fn bare(architecture: &str) -> GgufFile {
    GgufFile::default()
        .pair("general.architecture", Value::Str(architecture.into()))
        .pair(&format!("{architecture}.block_count"), Value::U32(1))
        .pair(&format!("{architecture}.embedding_length"), Value::U32(WIDTH as u32))
}

/// Values that tell their place.
fn values(part: usize) -> Vec<f32> {
    (0..WIDTH * NEURONS * EXPERTS).map(|i| (i * 4 + part as u64) as f32).collect()
}

/// Gate, up and down of expert `e`, down with its neurons as columns.
fn expert(e: usize) -> [Vec<f32>; 3] {
    let size = (WIDTH * NEURONS) as usize;
    [0, 1, 2].map(|part| values(part)[e * size..(e + 1) * size].to_vec())
}

fn check_expert(reading: &Reading, e: usize) {
    let [gate, up, down] = expert(e);
    let width = WIDTH as usize;
    for (i, found) in reading.neurons(0, Some(e)).iter().enumerate() {
        assert_eq!(found.gate, gate[i * width..][..width]);
        assert_eq!(found.up, up[i * width..][..width]);
        let column: Vec<f32> = (0..width).map(|r| down[r * NEURONS as usize + i]).collect();
        assert_eq!(found.down, column, "expert {e} neuron {i}");
    }
}

#[test]
fn experts_in_one_tensor_or_in_many_become_a_bundle_tensor_each() {
    let dir = TempDir::new();
    let name = |part: &str| format!("blk.0.ffn_{part}.weight");
    let router = |file: GgufFile| file.f32_tensor(&name("gate_inp"), &[WIDTH, EXPERTS], &[1.0; 192]);
    let merged = router(bare("llama"))
        .f32_tensor(&name("gate_exps"), &[WIDTH, NEURONS, EXPERTS], &values(0))
        .f32_tensor(&name("up_exps"), &[WIDTH, NEURONS, EXPERTS], &values(1))
        .f32_tensor(&name("down_exps"), &[NEURONS, WIDTH, EXPERTS], &values(2));
    let many = (0..3).fold(router(bare("llama")), |file, e| {
        let [gate, up, down] = expert(e);
        file.f32_tensor(&name(&format!("gate.{e}")), &[WIDTH, NEURONS], &gate)
            .f32_tensor(&name(&format!("up.{e}")), &[WIDTH, NEURONS], &up)
            .f32_tensor(&name(&format!("down.{e}")), &[NEURONS, WIDTH], &down)
    });
    for file in [merged, many] {
        let source = dir.file("m.gguf", &file.bytes());
        let (out, report) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
        let reading = Reading::open(&out);
        (0..3).for_each(|e| check_expert(&reading, e));
        assert_eq!(report.layers[0].experts, 3);
        let perm = reading.gguf.tensor("blk.0.ffn_perm").unwrap();
        assert_eq!(perm.dims[..], [NEURONS, EXPERTS]);
        assert!(reading.gguf.tensor(&name("gate_inp")).is_some());
        assert_eq!(Store::read(&reading.gguf).unwrap().layers[0].bundles.len(), 3);

        let twin = dir.path().join("twin.gguf");
        neuropil::store::twin(&out, &twin, &mut |_, _| true).unwrap();
        let twin = Gguf::open(&twin).unwrap();
        for (part, matrix) in ["gate_exps", "up_exps", "down_exps"].iter().enumerate() {
            let want: Vec<u8> = values(part).iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(twin.data(twin.tensor(&name(matrix)).unwrap()), want, "{matrix}");
        }
    }
}

#[test]
fn experts_are_sorted_each_by_its_own_counts() {
    let dir = TempDir::new();
    let name = |part: &str| format!("blk.0.ffn_{part}.weight");
    let file = bare("llama")
        .f32_tensor(&name("gate_exps"), &[WIDTH, NEURONS, EXPERTS], &values(0))
        .f32_tensor(&name("up_exps"), &[WIDTH, NEURONS, EXPERTS], &values(1))
        .f32_tensor(&name("down_exps"), &[NEURONS, WIDTH, EXPERTS], &values(2));
    let source = dir.file("m.gguf", &file.bytes());
    // Expert 0 as it is, expert 1 turned around, expert 2 with its last neuron first.
    let of = |e: usize, i: usize| match e {
        0 => 100.0 - i as f32,
        1 => i as f32,
        _ => f32::from(u8::from(i == 95)),
    };
    let counts: Vec<f32> = (0..3)
        .flat_map(|e| (0..4 * 96).map(move |k| of(e, k % 96) * if k < 96 { 1.0 } else { -1.0 }))
        .collect();
    let counts = GgufFile::default().f32_tensor("blk.0.ffn_count", &[NEURONS, 4, EXPERTS], &counts);
    let counts = dir.file("counts.gguf", &counts.bytes());
    let options = ConvertOptions { counts: Some(counts), ..ConvertOptions::default() };
    let (out, _) = convert(&dir, &source, &options).unwrap();
    let reading = Reading::open(&out);
    let first = |e: usize| reading.neurons(0, Some(e))[0].gate[0];
    let gate = |e: usize, i: usize| expert(e)[0][i * WIDTH as usize];
    assert_eq!([first(0), first(1), first(2)], [gate(0, 0), gate(1, 95), gate(2, 95)]);
    let perm = reading.perm(0);
    assert_eq!((perm[0], perm[96], perm[2 * 96], perm[2 * 96 + 95]), (0, 95, 1, 0));
}

#[test]
fn a_file_of_powerinfer_is_read_as_it_is() {
    let dir = TempDir::new();
    let model = toy(DType::Q4_0, DType::F32).model();
    let mut file = model.file().pair("powerinfer.sparse_threshold", Value::F32(0.25));
    for (index, layer) in model.layers.iter().enumerate() {
        let turned: Vec<f32> = (0..512).flat_map(|i| neuron(layer, i).down).collect();
        let entry =
            file.tensors.iter_mut().find(|t| t.name == format!("blk.{index}.ffn_down.weight")).unwrap();
        entry.name = format!("blk.{index}.ffn_down_t.weight");
        entry.dims = vec![256, 512];
        entry.type_id = codec::type_id(DType::Q4_0);
        entry.data = codec::encode(DType::Q4_0, &turned);
        let zeros = vec![0.0; 512 * 8];
        file = file.f32_tensor(&format!("blk.{index}.fc1.weight"), &[256, 8], &zeros[..2048]).f32_tensor(
            &format!("blk.{index}.fc2.weight"),
            &[8, 512],
            &zeros,
        );
    }
    let mut bytes = file.bytes();
    bytes[..4].copy_from_slice(b"PWRI");
    let source = dir.file("m.powerinfer.gguf", &bytes);
    assert!(Gguf::open(&source).unwrap_err().to_string().contains("neuropil convert"));
    let (out, report) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    let reading = Reading::open(&out);
    assert_eq!(reading.types(0), (DType::Q4_0, DType::Q4_0));
    assert_eq!(report.layers[1].down_loss, 0.0);
    for (i, found) in reading.neurons(1, None).iter().enumerate() {
        let want = neuron(&model.layers[1], i);
        let down = codec::decode(DType::Q4_0, &codec::encode(DType::Q4_0, &want.down));
        assert_eq!(bits(&found.gate), bits(&want.gate));
        assert_eq!(bits(&found.down), bits(&down));
    }
    let metadata = reading.gguf.metadata();
    assert_eq!(metadata.str("neuropil.ffn_activation").unwrap(), Some("relu"));
    assert_eq!(metadata.str("neuropil.predictor.input").unwrap(), Some("residual"));
    assert_eq!(metadata.f32s("neuropil.predictor.threshold").unwrap(), Some(&[0.25, 0.25][..]));
    assert!(metadata.get("powerinfer.sparse_threshold").is_none());
    assert!(reading.gguf.tensor("blk.1.fc2.weight").is_some());
}

#[test]
fn a_single_expert_stays_one() {
    let dir = TempDir::new();
    let name = |part: &str| format!("blk.0.ffn_{part}.weight");
    let [gate, up, down] = expert(0);
    let file = bare("llama")
        .f32_tensor(&name("gate_exps"), &[WIDTH, NEURONS, 1], &gate)
        .f32_tensor(&name("up_exps"), &[WIDTH, NEURONS, 1], &up)
        .f32_tensor(&name("down_exps"), &[NEURONS, WIDTH, 1], &down);
    let source = dir.file("m.gguf", &file.bytes());
    let (out, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    let reading = Reading::open(&out);
    check_expert(&reading, 0);
    let store = Store::read(&reading.gguf).unwrap();
    assert!(store.layers[0].numbered);
    assert_eq!(store.layers[0].bundles[0].name, name("bundle.0"));
    let (again, twin) = (dir.path().join("again.gguf"), dir.path().join("twin.gguf"));
    neuropil::store::convert(&out, &again, &ConvertOptions::default(), &mut |_, _| true).unwrap();
    assert!(std::fs::read(&again).unwrap() == std::fs::read(&out).unwrap());
    neuropil::store::twin(&out, &twin, &mut |_, _| true).unwrap();
    assert!(Gguf::open(&twin).unwrap().tensor(&name("down_exps")).is_some());
}

#[test]
fn other_architectures_of_powerinfer_keep_their_activation() {
    let dir = TempDir::new();
    let [gate, up, down] = expert(0);
    let mut bytes = bare("bamboo")
        .f32_tensor("blk.0.ffn_gate.weight", &[WIDTH, NEURONS], &gate)
        .f32_tensor("blk.0.ffn_up.weight", &[WIDTH, NEURONS], &up)
        .f32_tensor("blk.0.ffn_down_t.weight", &[WIDTH, NEURONS], &down)
        .bytes();
    bytes[..4].copy_from_slice(b"PWRI");
    let source = dir.file("m.gguf", &bytes);
    let (out, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    assert!(Reading::open(&out).gguf.metadata().get("neuropil.ffn_activation").is_none());
}

#[test]
fn what_cannot_be_cut_into_neurons_is_refused() {
    let dir = TempDir::new();
    let plain = || bare("llama").f32_tensor("blk.0.ffn_up.weight", &[64, 4], &[0.0; 256]);
    for (file, reason) in [
        (plain(), "only gated"),
        (plain().f32_tensor("blk.0.ffn_gate.weight", &[64, 4], &[0.0; 256]), "ffn_down"),
        (plain().f32_tensor("blk.0.ffn_gate.weight", &[32, 4], &[0.0; 128]), "[64, up to"),
        (plain().tensor("blk.0.ffn_gate.weight", &[64, 4], 26, vec![0; 1024]), "I32"),
        (plain().set("llama.block_count", Value::U32(0)), "0 layers"),
        (plain().without("llama.block_count"), "llama.block_count"),
        (plain().tensor("x", &[3], 9999, vec![0; 12]), "only gated"),
    ] {
        let source = dir.file("m.gguf", &file.bytes());
        let error = convert(&dir, &source, &ConvertOptions::default()).unwrap_err();
        assert!(!matches!(error, ConvertError::Write(_)), "{error}");
        assert!(error.to_string().contains(reason), "{reason}: {error}");
    }
}

/// The store that version 1 of the format is known by.
fn fixture() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/store-v1.gguf")
}

/// What it was made from.
fn fixture_toy() -> Toy {
    Toy {
        layers: 1,
        width: 64,
        heads: 2,
        ffn: 64,
        tied: true,
        dtypes: vec![("ffn_down", DType::F16), ("ffn_", DType::Q5_0), ("", DType::Q8_0)],
        ..Toy::default()
    }
}

#[test]
fn a_store_of_version_1_keeps_opening() {
    let path = fixture();
    let dir = TempDir::new();
    let source = dir.file("m.gguf", &fixture_toy().model().file().bytes());
    let (out, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
    assert!(path.is_file(), "copy {} there once, and never change it", out.display());
    assert!(std::fs::metadata(&path).unwrap().len() < 100_000);
    let reading = Reading::open(&path);
    let model = fixture_toy().model();
    for (index, layer) in model.layers.iter().enumerate() {
        assert_eq!(reading.types(index), (DType::Q5_0, DType::F16));
        for (i, found) in reading.neurons(index, None).iter().enumerate() {
            assert_eq!(*found, neuron(layer, i));
        }
    }
    let gguf = Gguf::open_header(&path).unwrap();
    let store = Store::read(&gguf).unwrap();
    assert_eq!(store.layers.len(), 1);
    let report = neuropil::gguf::verify(&gguf, &mut |_| ()).unwrap();
    assert_eq!(report.checksums, gguf.tensors().len() as u64);
}

#[test]
fn the_python_package_opens_a_store() {
    let script = "
import sys
try:
    from gguf import GGUFReader
except ImportError:
    sys.exit(77)
r = GGUFReader(sys.argv[1])
t = {t.name: t for t in r.tensors}
b = t['blk.0.ffn_bundle.weight']
print([int(n) for n in b.shape], b.tensor_type.name, b.data_offset % 4096, len(r.tensors))
print(r.fields['neuropil.store.version'].contents(), [int(n) for n in t['blk.0.ffn_perm'].data[:3]])
";
    let output = Command::new("python3").args(["-c", script]).arg(fixture()).output();
    let Ok(output) =
        output.map_err(|_| ()).and_then(|o| if o.status.code() == Some(77) { Err(()) } else { Ok(o) })
    else {
        eprintln!("SKIPPED: python3 has no gguf package; `pip install gguf` brings it");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines();
    let tensors = Gguf::open_header(&fixture()).unwrap().tensors().len();
    assert_eq!(lines.next(), Some(&*format!("[256, 64] I8 0 {tensors}")));
    assert_eq!(lines.next(), Some("1 [0, 1, 2]"));
}
