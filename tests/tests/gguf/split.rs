//! Models in several files.

use std::path::{Path, PathBuf};

use neuropil::gguf::{Gguf, GgufError};
use neuropil_tests::gguf_writer::{GgufFile, Value};
use neuropil_tests::temp::TempDir;

use crate::assert_message;

/// Shard `no` of `count`, with one tensor that holds its number.
fn shard(no: u32, count: u32, total: i32) -> GgufFile {
    let name = format!("t{no}");
    let file = GgufFile::default()
        .pair("split.no", Value::Raw(2, (no as u16).to_le_bytes().to_vec()))
        .pair("split.count", Value::Raw(2, (count as u16).to_le_bytes().to_vec()))
        .pair("split.tensors.count", Value::I32(total));
    let file = if no == 0 { file.pair("general.name", Value::Str("set".into())) } else { file };
    file.f32_tensor(&name, &[2], &[no as f32; 2])
}

fn write(dir: &TempDir, no: u32, file: &GgufFile) -> PathBuf {
    dir.file(&format!("model-{:05}-of-00003.gguf", no + 1), &file.bytes())
}

/// A set of three files, with what `change` makes of each.
fn set(dir: &TempDir, change: impl Fn(u32, GgufFile) -> GgufFile) -> Vec<PathBuf> {
    (0..3).map(|no| write(dir, no, &change(no, shard(no, 3, 3)))).collect()
}

#[track_caller]
fn refused(path: &Path) -> GgufError {
    let error = Gguf::open(path).unwrap_err();
    assert_message(&error);
    error
}

#[test]
fn any_member_opens_the_whole_set() {
    let dir = TempDir::new();
    let paths = set(&dir, |_, file| file);
    for path in &paths {
        let gguf = Gguf::open(path).unwrap();
        assert_eq!(gguf.metadata().require_str("general.name").unwrap(), "set");
        assert_eq!(gguf.tensors().len(), 3);
        assert!(gguf.paths().eq(paths.iter().map(|path| path.as_path())));
        let bytes: u64 = paths.iter().map(|path| path.metadata().unwrap().len()).sum();
        assert_eq!(gguf.file_bytes(), bytes);
        for no in 0..3 {
            let t = gguf.require(&format!("t{no}")).unwrap();
            let wanted = [no as f32; 2].map(f32::to_le_bytes).concat();
            let mut read = [0; 8];
            gguf.read_into(t, &mut read).unwrap();
            assert_eq!((t.shard, gguf.data(t), &read[..]), (no, &wanted[..], &wanted[..]));
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    let dir = TempDir::new();
    let paths = set(&dir, |_, file| file);
    std::fs::remove_file(&paths[1]).unwrap();
    for opened in [&paths[0], &paths[2]] {
        let error = refused(opened);
        assert!(matches!(&error, GgufError::MissingShard { missing, .. } if missing == &paths[1]), "{error}");
    }
}

#[test]
fn counts_that_differ_are_refused() {
    let dir = TempDir::new();
    let paths = set(&dir, |no, file| if no == 2 { shard(2, 4, 3) } else { file });
    let error = refused(&paths[0]);
    assert!(
        matches!(&error, GgufError::SplitMismatch { key: "split.count", found: 4, wanted: 3, .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("model-00003-of-00003.gguf") && text.contains("model-00001-of-00003.gguf"),
        "{text}"
    );
    // Opened by the odd one, the name and the count disagree.
    assert!(matches!(refused(&paths[2]), GgufError::SplitName { .. }));
}

#[test]
fn a_file_under_the_name_of_another_is_refused() {
    let dir = TempDir::new();
    let paths = set(&dir, |no, file| if no == 1 { shard(2, 3, 3) } else { file });
    let error = refused(&paths[0]);
    assert!(
        matches!(error, GgufError::SplitMismatch { key: "split.no", found: 2, wanted: 1, .. }),
        "{error}"
    );
    assert!(matches!(refused(&paths[1]), GgufError::SplitName { number: 3, .. }));
}

#[test]
fn tensors_that_do_not_add_up_are_refused() {
    let dir = TempDir::new();
    let paths = set(&dir, |no, _| shard(no, 3, 4));
    let error = refused(&paths[1]);
    assert!(matches!(error, GgufError::SplitTensorCount { found: 3, wanted: 4, .. }), "{error}");
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let dir = TempDir::new();
    let paths = set(&dir, |no, mut file| {
        if no == 1 {
            file.tensors[0].name = "t0".into();
        }
        file
    });
    let error = refused(&paths[0]);
    assert!(matches!(&error, GgufError::SplitDuplicateTensor { tensor, .. } if tensor == "t0"), "{error}");
    let text = error.to_string();
    assert!(text.contains("00001-of") && text.contains("00002-of"), "{text}");
}

#[test]
fn a_renamed_member_says_what_its_name_must_be() {
    let dir = TempDir::new();
    let path = dir.file("part two.gguf", &shard(1, 3, 3).bytes());
    let error = refused(&path);
    assert!(error.to_string().contains("-00002-of-00003.gguf"), "{error}");
}

#[test]
fn numbers_out_of_range_are_refused() {
    let dir = TempDir::new();
    assert!(matches!(refused(&write(&dir, 0, &shard(3, 3, 3))), GgufError::BadValue { .. }));
    assert!(matches!(refused(&write(&dir, 0, &shard(0, 60_000, 3))), GgufError::TooMany { .. }));
    let negative = GgufFile::default().pair("split.count", Value::I32(-3));
    assert!(matches!(refused(&write(&dir, 0, &negative)), GgufError::BadValue { .. }));
}

#[test]
fn a_set_of_one_needs_no_special_name() {
    let dir = TempDir::new();
    let gguf = Gguf::open(&dir.file("one.gguf", &shard(0, 1, 1).bytes())).unwrap();
    assert_eq!(gguf.tensors().len(), 1);
}
