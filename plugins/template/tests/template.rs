//! The template, as a host would load it.

use neuropil_plugin_conformance::{Filter, Library, check, checks, raw::Plugin};

#[test]
fn the_template_is_a_plugin() {
    let plugin = Plugin::of_crate("neuropil_plugin_template");
    assert_eq!(plugin.probe(&[]).unwrap().len(), 1);
    assert!(plugin.probe(&[("speed", "9")]).unwrap_err().text.contains("takes none"));
    assert!(plugin.open(1, &[]).is_err());
    let device = plugin.open(0, &[]).unwrap();
    let errors = checks::products(&device, |_| 1e-6);
    assert_eq!(errors.len(), 7, "{errors:?}");
    let (_, count) = checks::clusters(&device, 1e-5);
    assert_eq!(count, 7 * 36 * 2);
    checks::refusals(&device);
    checks::threads(&device);
}

#[test]
fn it_does_all_that_a_plugin_must() {
    let library = Library::of_crate("neuropil_plugin_template", &[]);
    let report = check(&library, &Filter::all(), &mut |_| ());
    assert_eq!(report.failed(), 0, "{}", report.summary());
    assert!(report.passed() > 3500, "{}", report.summary());
    assert!(report.precision().iter().all(|(_, error, _)| *error < 1e-6), "{:?}", report.precision());
}
