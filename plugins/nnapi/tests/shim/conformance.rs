//! The suite that every plugin must pass.

use neuropil_plugin_conformance::{Filter, Library, check};

use crate::kit::{Shim, plugin_path};

#[test]
fn the_plugin_passes_the_suite() {
    let shim = Shim::new();
    let path = shim.path.to_str().unwrap().to_string();
    for options in [&[][..], &[("precision", "f32"), ("widen", "on")], &[("device", "gpu"), ("widen", "on")]]
    {
        let given = [("library", path.as_str()), ("tokens", "1+3+8")];
        let library = Library::load(&plugin_path(), &[&given[..], options].concat()).unwrap();
        let report = check(&library, &Filter::all(), &mut |_| ());
        println!("{options:?}: {}", report.summary());
        for (kind, error, precision) in report.precision() {
            println!("  {kind}: {error:.2e}, {}", precision.name());
        }
        for (case, reason) in report.failures() {
            println!("FAILED {}: {reason}", case.id);
        }
        assert_eq!(report.failed(), 0);
    }
    shim.is_clean();
}

#[test]
fn int8_passes_but_for_the_errors_of_single_outputs() {
    let shim = Shim::new();
    let options = [("library", shim.path.to_str().unwrap()), ("tokens", "1+3+8"), ("int8", "on")];
    let library = Library::load(&plugin_path(), &options).unwrap();
    let report = check(&library, &Filter::new("*/channel8*").unwrap(), &mut |_| ());
    println!("{}", report.summary());
    assert!(report.passed() > 200 && report.failed() < report.passed() / 5);
    for (case, reason) in report.failures() {
        assert!(reason.contains("and 3e-2 is allowed"), "{}: {reason}", case.id);
    }
    shim.is_clean();
}
