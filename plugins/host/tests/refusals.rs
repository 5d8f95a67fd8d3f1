//! Files that are no plugins, each refused in one sentence; and plugins of other versions that work.

mod common;

use neuropil_device::{Backend, DType, Device, DeviceError, OpShape, Stage, Support};
use neuropil_plugin_host::{PluginBackend, find_plugins};

use common::{Block, Weights, cluster, fixture, folder, matmul, noise};

fn refused(path: &std::path::Path) -> String {
    let error = PluginBackend::load(path, "").err().expect("it must be refused").to_string();
    assert!(error.contains(path.file_name().unwrap().to_str().unwrap()) && !error.contains('\n'), "{error}");
    error
}

#[test]
fn what_is_no_plugin_is_refused_with_the_reason() {
    let folder = folder("refusals");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    assert!(refused(&folder.join("missing.so")).contains("cannot be read: No such file"));
    assert!(refused(&folder).ends_with("it is no file"));
    assert!(refused(&file("text.so", b"hello, I am a text of many words")).ends_with("it is no ELF file"));
    assert!(refused(&file("empty.so", b"")).ends_with("the file is empty"));

    let good = fixture(&folder, "good", &[]);
    let mut bytes = std::fs::read(&good).unwrap();
    assert!(refused(&file("cut.so", &bytes[..200])).contains("cannot be loaded: "));
    bytes[18] = 40;
    assert!(refused(&file("arm.so", &bytes)).contains("is built for ARM (32 bit), but this program runs on"));

    let bad = |name: &str, macros: &[&str]| refused(&fixture(&folder, name, macros));
    assert!(bad("symbol", &["-DNO_SYMBOL"]).ends_with("does not export neuropil_plugin_query"));
    assert!(bad("refuses", &["-DREFUSES"]).contains("refuses this program, which speaks version 1.0"));
    assert!(
        bad("next", &["-DMAJOR=2"]).contains("speaks version 2.0 of the plugin interface, but this program")
    );
    assert!(bad("last", &["-DMAJOR=0"]).contains("speaks version 0.0"));
    assert!(bad("short", &["-DSHORT"]).ends_with("gives a table of 104 bytes, but 112 are required"));
    assert!(bad("no_size", &["-DNO_SIZE"]).ends_with("gives a table of 0 bytes, but 112 are required"));
    assert!(bad("null", &["-DNULL_QUERY"]).ends_with("does not offer query, which is required"));
}

#[test]
fn a_plugin_in_c_works_whatever_minor_version_it_has() {
    let folder = folder("versions");
    for (name, macros) in [("equal", &[][..]), ("newer", &["-DNEWER"]), ("cut", &["-DCUT"])] {
        let backend = PluginBackend::load(&fixture(&folder, name, macros), "").unwrap();
        assert_eq!((backend.plugin_name(), backend.version()), ("fixture", "0.1"));
        assert_eq!(backend.messages(), ["info: hello"]);
        assert_eq!(backend.probe()[0].name, "a unit in C");
        let error = backend.open(1).err();
        assert!(matches!(error, Some(DeviceError::NoSuchDevice { index: 1, .. })), "{error:?}");
        let device = backend.open_unit(0).unwrap();
        let description = device.describe();
        assert_eq!(description.supports.len(), 1, "{description}");
        assert!(description.to_string().contains("no:  matmul group8: f32 matmuls only"), "{description}");

        let weights = Weights::new(DType::Q4_K, 5, 256, 1);
        let weight = weights.prepare(&device).unwrap();
        let x = noise(7 * 256, 2);
        let y = matmul(&device, &weight, 5, &x, 7, false).unwrap();
        for (got, want) in y.iter().zip(weights.product(&x).0) {
            assert!((f64::from(*got) - want).abs() < 1e-3, "{name}: {got} {want}");
        }
        // It only multiplies; the host makes feed-forwards of that.
        let block = Block::new(DType::Q8_0, DType::Q8_0, 64, 32);
        let weight = block.prepare(&device).unwrap();
        let activation = neuropil_device::Activation::new(neuropil_device::ActivationKind::Silu);
        let input = noise(32, 3);
        cluster(&device, &weight, (Stage::Fused, activation), &input, (&[0.0; 64], 32), 1).unwrap();
        let op = OpShape::Matmul { dtype: DType::Q8_0, rows: 5, cols: 32, tokens: 1 };
        assert_eq!(device.supports(&op), Support::Native);
        assert!(probe_error(&backend.with_options("a=b").unwrap()).contains("there are no options"));
    }
}

/// Why a probe fails.
fn probe_error(backend: &PluginBackend) -> String {
    assert!(backend.probe().is_empty());
    backend.units().unwrap_err().to_string()
}

#[test]
fn a_unit_that_uses_one_scale_for_all_is_found_and_switched_off() {
    let folder = folder("wrong");
    let path = fixture(&folder, "one_scale", &["-DONE_SCALE"]);
    let device = PluginBackend::load(&path, "").unwrap().open_unit(0).unwrap();
    let description = device.describe();
    assert!(description.supports.is_empty(), "{description}");
    let wrong = description.disabled.iter().find(|no| no.op == "matmul f32").unwrap();
    assert!(wrong.failed && wrong.reason.starts_with("its results are wrong: an error of "), "{wrong:?}");
    let op = OpShape::Matmul { dtype: DType::F32, rows: 8, cols: 32, tokens: 1 };
    assert!(matches!(device.supports(&op), Support::No(reason) if reason.contains("results are wrong")));
    let error = Weights::new(DType::F32, 8, 32, 1).prepare(&device).unwrap_err();
    assert!(matches!(&error, DeviceError::Unsupported { .. }), "{error}");
    // Who trusts it gets it.
    let device = PluginBackend::load(&path, "self_test=off").unwrap().open_unit(0).unwrap();
    assert_eq!(device.describe().supports, ["matmul f32 (not tested)"]);
    assert_eq!(device.supports(&op), Support::Native);
}

#[test]
fn a_folder_is_searched_for_libraries() {
    let folder = folder("find");
    for name in ["b.so", "a.so", "c.txt"] {
        std::fs::write(folder.join(name), "").unwrap();
    }
    std::fs::create_dir(folder.join("d.so")).unwrap();
    let found = find_plugins(&folder).unwrap();
    assert_eq!(found, [folder.join("a.so"), folder.join("b.so")]);
    assert!(find_plugins(&folder.join("none")).unwrap_err().to_string().contains("cannot be read"));
}
