//! The template in C, as a vendor would build it.

use std::path::Path;
use std::process::Command;

use neuropil_plugin_abi::{NP_INVALID, NP_KIND_CPU};
use neuropil_plugin_conformance::{Filter, Library, check, checks, raw::Plugin};

#[test]
fn the_template_in_c_is_a_plugin() {
    let plugins = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let library =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("template-c-{}.so", std::process::id()));
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"]);
    cc.arg(plugins.join("abi/include")).arg(plugins.join("template-c/plugin.c")).arg("-lm").arg("-o");
    let Ok(run) = cc.arg(&library).output() else {
        println!("skipped: there is no cc here");
        return;
    };
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let plugin = Plugin::load(&library);
    let report = check(&Library::load(&library, &[]).unwrap(), &Filter::all(), &mut |_| ());
    assert_eq!(report.failed(), 0, "{}", report.summary());
    assert!(report.passed() > 3500, "{}", report.summary());
    std::fs::remove_file(library).unwrap();

    let units = plugin.probe(&[]).unwrap();
    assert_eq!((units.len(), units[0].kind), (1, NP_KIND_CPU));
    let key = "ä".repeat(40);
    let refused = plugin.probe(&[(&key, "1")]).unwrap_err();
    assert_eq!((refused.code, refused.text.contains("takes none")), (NP_INVALID, true));
    assert_eq!(plugin.open(1, &[]).err().map(|failure| failure.code), Some(NP_INVALID));

    let device = plugin.open(0, &[]).unwrap();
    assert_eq!(device.info(), units[0]);
    let errors = checks::products(&device, |_| 1e-6);
    assert_eq!(errors.len(), 7, "{errors:?}");
    let (worst, count) = checks::clusters(&device, 1e-5);
    assert_eq!(count, 7 * 36 * 2);
    println!("products {errors:?}, clusters {worst:e}");
    checks::refusals(&device);
    checks::threads(&device);
}
