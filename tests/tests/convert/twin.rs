//! The dense twin has the weights of its store, in a file that any program reads.

use neuropil::gguf::Gguf;
use neuropil::store::{self, ConvertOptions};
use neuropil_device::DType;
use neuropil_tests::codec;
use neuropil_tests::temp::TempDir;

use crate::reading::{Reading, bits};
use crate::{convert, toy};

#[test]
fn a_twin_has_the_bits_of_its_store() {
    for (gate_up, down) in [
        (DType::F32, DType::F32),
        (DType::Q4_0, DType::F16),
        (DType::Q4_K, DType::BF16),
        (DType::Q6_K, DType::Q4_0),
        (DType::Q5_1, DType::Q6_K),
    ] {
        let dir = TempDir::new();
        let model = toy(gate_up, down).model();
        let source = dir.file("m.gguf", &model.file().bytes());
        let (out, _) = convert(&dir, &source, &ConvertOptions::default()).unwrap();
        let path = dir.path().join("twin.gguf");
        let bytes = store::twin(&out, &path, &mut |_, _| true).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes);
        let (twin, reading) = (Gguf::open(&path).unwrap(), Reading::open(&out));
        assert_eq!(twin.tensors().len(), model.file().tensors.len());
        assert!(twin.metadata().iter().all(|(key, _)| !key.starts_with("neuropil.")));
        for (index, layer) in model.layers.iter().enumerate() {
            for weight in [&layer.ffn_gate, &layer.ffn_up] {
                let tensor = twin.tensor(&weight.name).unwrap();
                assert_eq!((tensor.dtype, twin.data(tensor)), (Some(gate_up), &*weight.bytes));
            }
            let tensor = twin.tensor(&layer.ffn_down.name).unwrap();
            let float = matches!(down, DType::F16 | DType::BF16);
            assert_eq!(tensor.dtype, Some(if float { down } else { DType::F32 }));
            assert_eq!(tensor.dims[..], [512, 256]);
            let values = codec::decode(tensor.dtype.unwrap(), twin.data(tensor));
            for (i, neuron) in reading.neurons(index, None).iter().enumerate() {
                let column: Vec<f32> = (0..256).map(|r| values[r * 512 + i]).collect();
                assert_eq!(bits(&column), bits(&neuron.down), "{down} neuron {i}");
            }
        }
        // And back: the twin's store is that store, but for the digest of what it was made from.
        let again = dir.path().join("again.gguf");
        let down_type = Some(reading.types(0).1);
        let options = ConvertOptions { down_type, ..ConvertOptions::default() };
        store::convert(&path, &again, &options, &mut |_, _| true).unwrap();
        let again = Reading::open(&again);
        for layer in 0..2 {
            let (a, b) = (reading.neurons(layer, None), again.neurons(layer, None));
            let same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
            assert!(same == a.len() || down == DType::Q4_0 || down == DType::Q6_K, "{down}: {same}");
        }
    }
}
