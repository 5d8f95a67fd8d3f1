//! Toy models through the engine's reader: the files that all other tests stand on are files it can read.

use neuropil::gguf::Gguf;
use neuropil_device::DType;
use neuropil_tests::codec;
use neuropil_tests::gguf_writer::Value;
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{RopeScaling, Toy};

#[test]
fn every_tensor_arrives_as_written() {
    let toy = Toy {
        dtypes: vec![("attn_q", DType::Q4_K), ("ffn_down", DType::Q6_K), ("token_embd", DType::BF16)],
        rope_scaling: RopeScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 8192 },
        chat_template: Some("{{ messages[0].content }}".into()),
        ..Toy::default()
    };
    let (_dir, path) = toy.temp();
    let gguf = Gguf::open(&path).unwrap();
    let model = toy.model();
    assert_eq!(gguf.tensors().len(), model.weights().len());
    for weight in model.weights() {
        let tensor = gguf.require(&weight.name).unwrap();
        assert_eq!(
            (tensor.rows(), tensor.cols()),
            (weight.rows as u64, weight.cols as u64),
            "{}",
            weight.name
        );
        assert_eq!(tensor.type_id, codec::type_id(weight.dtype));
        assert_eq!(gguf.data(tensor), weight.bytes);
    }
    assert_eq!(gguf.metadata().u64("llama.block_count").unwrap(), Some(2));
}

#[test]
fn a_row_that_is_not_whole_blocks_is_refused() {
    let mut file = Toy::default().file().set("llama.context_length", Value::U32(64)).without("general.name");
    let tensor = file.tensors.iter_mut().find(|t| t.name == "blk.0.attn_q.weight").unwrap();
    (tensor.dims, tensor.type_id) = (vec![128, 512], codec::type_id(DType::Q4_K));
    let dir = TempDir::new();
    let error = Gguf::open(&dir.file("rows.gguf", &file.bytes())).unwrap_err().to_string();
    assert!(error.contains("blk.0.attn_q.weight"), "{error}");
}
