//! Compiled weights that are kept: loaded the next time, never under other conditions, and never when the file is not
//! what was written. A second open in which `prepare` fails shows that a plan was loaded.

mod common;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use neuropil_device::{Activation, ActivationKind, DType, DeviceError, Stage};
use neuropil_plugin_host::{PluginBackend, PluginDevice};

use common::{Block, Weights, cluster, fixture, folder, matmul, noise, sim};

const NO_PREPARE: &str = "fault=error@prepare";

fn backend(folder: &Path, options: &str) -> PluginBackend {
    let host = format!("compile_ms=1&self_test=off&plans={}&{options}", folder.display());
    PluginBackend::load(sim(), &host).unwrap()
}

fn open(folder: &Path, options: &str) -> Arc<PluginDevice> {
    backend(folder, options).open_unit(0).unwrap()
}

/// Every form of the weight has a size of its own: 40 rows of 96 columns.
fn product(device: &PluginDevice, seed: u64) -> Result<Vec<f32>, DeviceError> {
    let weight = Weights::new(DType::Q8_0, 40, 96, seed).prepare(device)?;
    matmul(device, &weight, 40, &noise(3 * 96, 2), 3, false)
}

fn feed_forward(device: &PluginDevice) -> Result<Vec<f32>, DeviceError> {
    let weight = Block::new(DType::Q8_0, DType::Q4_0, 64, 96).prepare(device)?;
    let (x, silu) = (noise(3 * 96, 2), Activation::new(ActivationKind::Silu));
    cluster(device, &weight, (Stage::Fused, silu), &x, (&[0.0; 192], 96), 3).map(|(_, y)| y)
}

/// The files in a folder, by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn a_weight_is_compiled_once() {
    for options in ["", "clusters=off", "weights=channel4", "weights=channel4&outliers=100", "buckets=any"] {
        let folder = folder("plans-once").join("made/when/needed");
        let first = open(&folder, &format!("{options}&compile_ms=100"));
        let began = Instant::now();
        let want = (product(&first, 1).unwrap(), feed_forward(&first).unwrap());
        assert!(began.elapsed() >= Duration::from_millis(200));
        let kept = files(&folder);
        assert_eq!(kept.len(), if options == "clusters=off" { 4 } else { 2 }, "{options}");
        assert!(kept.iter().all(|path| path.extension().is_some_and(|e| e == "plan")), "{kept:?}");

        let options = format!("{options}&{NO_PREPARE}");
        let second = open(&folder, &options);
        assert_eq!((product(&second, 1).unwrap(), feed_forward(&second).unwrap()), want, "{options}");
        assert_eq!(files(&folder), kept);
        let off = format!("self_test=off&compile_ms=1&plans=off&{options}");
        let off = PluginBackend::load(sim(), &off).unwrap().plans_in(&folder).open_unit(0).unwrap();
        assert!(product(&off, 1).is_err(), "{options}");

        #[cfg(unix)]
        for (path, mode) in [(&kept[0], 0o600), (&folder, 0o700)] {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, mode);
        }
    }
}

#[test]
fn a_program_names_a_folder_for_those_who_do_not() {
    let (own, other) = (folder("plans-own"), folder("plans-other"));
    let backend = PluginBackend::load(sim(), "compile_ms=1&self_test=off").unwrap();
    product(&backend.open_unit(0).unwrap(), 1).unwrap();
    let backend = backend.plans_in(&own);
    product(&backend.open_unit(0).unwrap(), 1).unwrap();
    assert_eq!(files(&own).len(), 1);
    let text = format!("compile_ms=1&self_test=off&{NO_PREPARE}");
    product(&backend.with_options(&text).unwrap().open_unit(0).unwrap(), 1).unwrap();
    let text = format!("compile_ms=1&self_test=off&plans={}", other.display());
    product(&backend.with_options(&text).unwrap().open_unit(0).unwrap(), 1).unwrap();
    assert_eq!((files(&own).len(), files(&other).len()), (1, 1));
}

#[test]
fn a_unit_without_plans_keeps_none() {
    let folder = folder("plans-none");
    // No compatibility text, and no functions for plans.
    product(&open(&folder, "compile_ms=0"), 1).unwrap();
    let path = fixture(&common::folder("plans-fixture"), "equal", &[]);
    let options = format!("plans={}", folder.display());
    let device = PluginBackend::load(&path, &options).unwrap().open_unit(0).unwrap();
    Weights::new(DType::F32, 8, 32, 1).prepare(&device).unwrap();
    assert!(files(&folder).is_empty());
}

#[test]
fn what_a_plan_depends_on_is_in_its_name() {
    let folder = folder("plans-names");
    product(&open(&folder, ""), 1).unwrap();
    let other = [
        ("activations=8", 1),
        ("buckets=1+16", 1),
        ("weights=group8", 2),
        ("weights=f16", 1),
        ("weights=channel4", 1),
        ("weights=channel4&outliers=100", 1),
    ];
    for (count, (options, seed)) in other.into_iter().enumerate() {
        let refused = open(&folder, &format!("{options}&{NO_PREPARE}"));
        assert!(product(&refused, seed).is_err(), "{options}");
        product(&open(&folder, options), seed).unwrap();
        assert_eq!(files(&folder).len(), count + 2, "{options}");
    }
    // What does not matter to a plan is not.
    product(&open(&folder, &format!("latency_us=1&deadline_ms=20000&{NO_PREPARE}")), 1).unwrap();
    // The second unit is another one.
    let two = backend(&folder, &format!("units=2&{NO_PREPARE}"));
    assert!(product(&two.open_unit(1).unwrap(), 1).is_err());
}

#[test]
fn a_damaged_file_is_written_anew_and_results_are_right() {
    let folder = folder("plans-damaged");
    let want = product(&open(&folder, ""), 1).unwrap();
    let file = files(&folder)[0].clone();
    let good = fs::read(&file).unwrap();
    product(&open(&folder, ""), 7).unwrap();
    let foreign = files(&folder).into_iter().find(|path| *path != file).unwrap();
    let mut damaged: Vec<Vec<u8>> = vec![fs::read(&foreign).unwrap(), b"a text".to_vec(), vec![0; 4096]];
    damaged.extend(
        [0, 1, 16, 47, 48, 56, 87, 88, 89, good.len() / 2, good.len() - 1].map(|cut| good[..cut].to_vec()),
    );
    damaged.push([&good[..], &[0]].concat());
    // Every byte of the head, and of the plan those of the SDK, of the beginning, the middle and the end.
    let places = (0..140).chain([good.len() / 2, good.len() - 20, good.len() - 12, good.len() - 1]);
    for place in places {
        let mut bytes = good.clone();
        bytes[place] ^= 1 << (place % 8);
        damaged.push(bytes);
    }
    for (number, bytes) in damaged.iter().enumerate() {
        fs::write(&file, bytes).unwrap();
        assert_eq!(product(&open(&folder, ""), 1).as_ref(), Ok(&want), "{number}");
        assert_eq!(fs::read(&file).unwrap(), good, "{number}");
    }
    assert_eq!(product(&open(&folder, NO_PREPARE), 1), Ok(want.clone()));
    assert_eq!(files(&folder).len(), 2, "nothing is left behind");

    // What is no file cannot be replaced, and nothing more is tried.
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("full")).unwrap();
    let backend = backend(&folder, "");
    let device = backend.open_unit(0).unwrap();
    assert_eq!(product(&device, 1), Ok(want));
    product(&device, 8).unwrap();
    assert_eq!(backend.messages().len(), 1, "{:?}", backend.messages());
    assert_eq!(files(&folder).len(), 2);
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let folder = folder("plans-refused");
    let file = folder.join("file");
    fs::write(&file, "").unwrap();
    for place in [file.join("plans"), file.clone()] {
        let backend = backend(&place, "");
        let device = backend.open_unit(0).unwrap();
        assert_eq!(product(&device, 1), product(&common::open("").unwrap(), 1));
        feed_forward(&device).unwrap();
        let messages = backend.messages();
        assert_eq!(messages.len(), 1, "{messages:?}");
        let start = format!("warning: not every compiled weight is kept in {}: ", place.display());
        assert!(messages[0].starts_with(&start), "{messages:?}");
    }
    let closed = folder.join("closed");
    fs::create_dir(&closed).unwrap();
    let mut permissions = fs::metadata(&closed).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&closed, permissions).unwrap();
    // Who may do everything may do this too.
    product(&open(&closed, ""), 1).unwrap();
    product(&open(&closed, ""), 1).unwrap();
}

#[test]
fn faults_while_a_plan_is_saved_or_loaded() {
    let want = product(&common::open("").unwrap(), 1).unwrap();
    for at in ["save_plan", "load_plan"] {
        for kind in ["error", "oom", "panic", "lost", "hang"] {
            let folder = folder("plans-faults");
            if at == "load_plan" {
                product(&open(&folder, ""), 1).unwrap();
            }
            let fault = format!("fault={kind}@{at}");
            // Opening and preparing have ten times the deadline.
            let backend = backend(&folder, &format!("{fault}&hang_ms=3000&deadline_ms=100"));
            let device = backend.open_unit(0).unwrap();
            let (began, got) = (Instant::now(), product(&device, 1));
            if matches!(kind, "lost" | "hang") {
                assert!(matches!(got, Err(DeviceError::Lost { .. })), "{fault}: {got:?}");
                assert_eq!(got.err(), device.lost(), "{fault}");
                assert!(began.elapsed() < Duration::from_secs(30), "{fault}");
                assert!(files(&folder).is_empty(), "{fault}: it would happen again");
            } else {
                assert_eq!(got.as_ref(), Ok(&want), "{fault}");
                // The file is there again, and the fault in saving was the weight's alone.
                assert_eq!(files(&folder).len(), usize::from(at == "load_plan"), "{fault}");
                product(&device, 5).unwrap();
                assert_eq!(files(&folder).len(), 1 + usize::from(at == "load_plan"), "{fault}");
                let told = usize::from(at == "save_plan");
                let ours = backend.messages().iter().filter(|text| text.contains("is kept in")).count();
                assert_eq!(ours, told, "{fault}: {:?}", backend.messages());
            }
            drop(device);
            assert_eq!(product(&open(&folder, ""), 1).as_ref(), Ok(&want), "{fault}");
        }
    }
}

#[test]
fn a_plan_that_would_crash_the_process_would_do_so_once() {
    let folder = folder("plans-crash");
    product(&open(&folder, ""), 1).unwrap();
    let kept = files(&folder);
    let device = open(&folder, "fault=hang@load_plan&hang_ms=1000");
    let loading = std::thread::spawn(move || product(&device, 1).map(drop));
    let mut seen = false;
    while !loading.is_finished() {
        let now = files(&folder);
        seen |= now.len() == 1 && now[0].extension().is_some_and(|e| e == "tmp");
        std::thread::sleep(Duration::from_millis(5));
    }
    loading.join().unwrap().unwrap();
    assert!(seen, "while it is loaded its file has another name");
    assert_eq!(files(&folder), kept);
}

#[test]
fn a_plan_whose_results_are_wrong_is_forgotten() {
    let folder = folder("plans-wrong");
    let options = "self_test=on&fault_columns=96";
    product(&open(&folder, options), 1).unwrap();
    feed_forward(&open(&folder, options)).unwrap();
    let kept = files(&folder);
    let spoiled = open(&folder, &format!("{options}&fault=tile@matmul"));
    let error = product(&spoiled, 1).unwrap_err().to_string();
    assert!(error.contains("the result of a product is wrong"), "{error}");
    let left = files(&folder);
    assert_eq!((kept.len(), left.len()), (2, 1));
    let spoiled = open(&folder, &format!("{options}&fault=nan@cluster"));
    assert!(feed_forward(&spoiled).is_err());
    assert!(files(&folder).is_empty());
}

#[test]
fn the_folder_is_bounded_and_other_files_stay() {
    let folder = folder("plans-bounded");
    // With the sizes around it, one of these fits into a MiB, and two do not.
    let prepare = |device: &PluginDevice, rows, seed| {
        Weights::new(DType::F32, rows, 256, seed).prepare(device).map(drop).unwrap();
    };
    let other = ["notes.txt", "mine.plan"].map(|name| folder.join(name));
    other.iter().for_each(|path| fs::write(path, vec![0; 2 << 20]).unwrap());
    let old = SystemTime::now() - Duration::from_secs(7200);
    let unfinished = folder.join("a".repeat(64) + ".1-2.tmp");
    File::create(&unfinished).unwrap().set_modified(old).unwrap();
    let kept = || files(&folder).into_iter().filter(|path| !other.contains(path)).collect::<Vec<_>>();

    let first = backend(&folder, "plans_mib=1");
    let device = first.open_unit(0).unwrap();
    prepare(&device, 600, 1);
    let one = kept();
    assert_eq!(one.len(), 1, "what a crash left behind is gone");
    prepare(&device, 600, 2);
    assert_eq!(kept(), one, "what this unit uses is not thrown out");
    let messages = first.messages();
    assert!(messages.len() == 1 && messages[0].contains("the 1 MiB that plans_mib allows"), "{messages:?}");

    // The next run uses another one, so the first goes.
    prepare(&open(&folder, "plans_mib=1"), 600, 2);
    let two = kept();
    assert!(two.len() == 1 && two != one);
    // With room for two, the one that was used longer ago goes.
    prepare(&open(&folder, "plans_mib=2"), 600, 3);
    assert_eq!(kept().len(), 2);
    File::open(&two[0]).unwrap().set_modified(old).unwrap();
    prepare(&open(&folder, &format!("plans_mib=2&{NO_PREPARE}")), 600, 2);
    prepare(&open(&folder, "plans_mib=2"), 1200, 4);
    assert!(kept().len() == 2 && kept().contains(&two[0]), "{two:?} {:?}", kept());
    // One that can never fit is not kept, and throws nothing out.
    let small = backend(&folder, "plans_mib=1");
    prepare(&small.open_unit(0).unwrap(), 1200, 5);
    assert!(kept().len() == 2 && small.messages().len() == 1, "{:?}", small.messages());
    assert!(other.iter().all(|path| path.exists()));
}
