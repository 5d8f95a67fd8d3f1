//! A process that ends while another thread works with a unit. The libraries of QNN crash then if nobody keeps them apart;
//! so this program runs itself, with a test that is ignored otherwise.

mod common;

use std::process::Command;
use std::time::Duration;

use common::{libraries, open};
use neuropil_plugin_abi::NP_SCHEME_F16;
use neuropil_plugin_conformance::sample::Sample;

#[test]
fn a_process_may_end_at_any_time() {
    if libraries("libQnnHtp.so").is_empty() {
        return;
    }
    for round in 0..6 {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let run = again.args(["--exact", "end", "--ignored", "--nocapture"]).output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert_eq!(
            (run.status.code(), said.contains("the end")),
            (Some(7), true),
            "{round}: {:?}",
            run.status
        );
    }
}

#[test]
#[ignore = "it ends its process"]
fn end() {
    for library in [libraries("libQnnHtp.so"), libraries("libQnnCpu.so")].concat() {
        let (began, begin) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let sample = Sample::random(NP_SCHEME_F16, 64, 128, 1);
            loop {
                let device = open(&library, &[("tokens", "1+4")]).unwrap();
                let weight = device.prepare(&[&sample]).unwrap();
                device.matmul(&[&weight], &[1.0; 128], 1).unwrap();
                let _ = began.send(());
            }
        });
        begin.recv().unwrap();
    }
    std::thread::sleep(Duration::from_millis(u64::from(std::process::id() % 50)));
    println!("the end");
    std::process::exit(7);
}
