//! Split files: any part leads to the set, and what does not fit together is refused by name.
#![cfg(feature = "std")]

mod common;

use std::path::Path;

use common::*;
use skep_gguf::{ErrorKind, Gguf, read};

/// A part with one tensor of 32 bytes, all of the value `fill`.
fn part(model: &str, no: u16, count: u16, tensors: i32, fill: u8) -> Vec<u8> {
    let mut raw = Raw::new();
    if no == 0 {
        raw = raw.kv("general.architecture", STRING, string(model)).kv(
            "tokenizer.ggml.tokens",
            ARRAY,
            array(STRING, 1, &string("a")),
        );
    }
    raw = raw
        .kv("split.no", U16, no.to_le_bytes())
        .kv("split.count", U16, count.to_le_bytes())
        .kv("split.tensors.count", I32, tensors.to_le_bytes())
        .tensor(format!("blk.{no}.w"), &[8], 0, 0);
    raw.data = vec![fill; 32];
    raw.build()
}

fn three() -> Vec<Vec<u8>> {
    (0..3).map(|no| part("x", no, 3, 3, no as u8 + 1)).collect()
}

fn check<B: AsRef<[u8]>>(gguf: &Gguf<B>) {
    assert_eq!((gguf.parts(), gguf.architecture().unwrap()), (3, "x"));
    assert_eq!(gguf.tensors().len(), 3);
    for no in 0..3usize {
        let tensor = gguf.tensor(&format!("blk.{no}.w")).unwrap();
        assert_eq!(tensor.part(), no);
        assert!(gguf.data(tensor).iter().all(|&byte| usize::from(byte) == no + 1));
        assert!(gguf.part(no).is_some());
    }
    assert_eq!(gguf.u32("split.no").unwrap(), Some(0));
    assert_eq!(gguf.metadata().count(), 5);
}

#[test]
fn parts_in_any_order() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let parts = order.map(|i| three()[i].clone()).to_vec();
        check(&Gguf::join(parts).unwrap());
    }
}

#[test]
fn a_part_alone_names_the_others() {
    let [first, second, _] = three().try_into().unwrap();
    let error = Gguf::parse(second.clone()).unwrap_err();
    assert_eq!(error.to_string(), "a part of a file split in 3: parts 1, 3 are missing");
    let error = Gguf::join(vec![first, second]).unwrap_err();
    assert_eq!(error.to_string(), "file 1 given: a part of a file split in 3: part 3 is missing");
    let error = Gguf::parse(part("x", 1, u16::MAX, 3, 0)).unwrap_err();
    assert!(error.to_string().len() < 200, "{error}");
}

#[test]
fn sets_that_do_not_fit() {
    let refused = |parts: Vec<Vec<u8>>| Gguf::join(parts).unwrap_err();
    let [a, b, c] = three().try_into().unwrap();

    assert!(matches!(refused(vec![]).kind(), ErrorKind::NoParts));
    let error = refused(vec![a.clone(), b.clone(), b.clone(), c.clone()]);
    assert_eq!(error.to_string(), "file 3 given: part 2 was given twice: also as file 2 given");
    let error = refused(vec![a.clone(), b.clone(), part("x", 2, 4, 3, 3)]);
    assert!(matches!(error.kind(), ErrorKind::MixedParts { key, .. } if key == "split.count"), "{error}");
    // The total says 4, of another model.
    let error = refused(vec![a.clone(), b.clone(), part("x", 2, 3, 4, 3)]);
    assert!(
        matches!(error.kind(), ErrorKind::MixedParts { key, .. } if key == "split.tensors.count"),
        "{error}"
    );
    assert_eq!(error.file(), Some("file 3 given"));
    let error = refused((0..3).map(|no| part("x", no, 3, 4, 0)).collect());
    assert!(matches!(error.kind(), ErrorKind::TensorTotal { declared: 4, found: 3 }), "{error}");
    let error = refused(vec![a.clone(), b.clone(), part("x", 3, 3, 3, 3)]);
    assert!(matches!(error.kind(), ErrorKind::PartNumber { number: 3, count: 3 }), "{error}");
    let error = refused(vec![a.clone(), b.clone(), Raw::new().build()]);
    assert!(matches!(error.kind(), ErrorKind::NotSplit { key: "split.count" }), "{error}");
    let error = refused(vec![Raw::new().build(), Raw::new().build()]);
    assert!(matches!(error.kind(), ErrorKind::NotSplit { .. }), "{error}");
    let error = refused(vec![a.clone(), b.clone(), c[..c.len() - 1].to_vec()]);
    assert!(matches!(error.kind(), ErrorKind::OutOfFile { .. }), "{error}");
    assert_eq!((error.file(), error.tensor()), (Some("file 3 given"), Some("blk.2.w")));
}

#[test]
fn parts_of_two_models() {
    let [a, b, _] = three().try_into().unwrap();
    let mut alien = Raw::new()
        .kv("general.architecture", STRING, string("y"))
        .kv("split.no", U16, 2u16.to_le_bytes())
        .kv("split.count", U16, 3u16.to_le_bytes())
        .kv("split.tensors.count", I32, 3i32.to_le_bytes())
        .tensor("blk.2.w", &[8], 0, 0)
        .data(32);
    let error = Gguf::join(vec![a.clone(), b.clone(), alien.build()]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::MixedParts { key, .. } if key == "general.architecture"));

    // The same tensor in two parts.
    alien.entries.remove(0);
    alien.tensors.clear();
    let alien = alien.tensor("blk.1.w", &[8], 0, 0).build();
    let error = Gguf::join(vec![a, b, alien]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Duplicate), "{error}");
    assert_eq!((error.tensor(), error.file()), (Some("blk.1.w"), Some("file 3 given")));
}

#[test]
fn counts_of_files_that_are_not_split() {
    for count in [0, 1] {
        let file = part("x", 0, count, 1, 9);
        assert_eq!(Gguf::parse(&file).unwrap().parts(), 1);
        assert_eq!(Gguf::join(vec![&file]).unwrap().parts(), 1);
    }
    // Widths other than those that llama.cpp writes are fine, numbers out of range are not.
    let with = |ty, value: &[u8]| Raw::new().kv("split.count", ty, value).build();
    assert!(Gguf::parse(with(U64, &1u64.to_le_bytes())).is_ok());
    for file in [with(U64, &u64::MAX.to_le_bytes()), with(I32, &(-1i32).to_le_bytes()), with(U8, &[2])] {
        assert!(Gguf::parse(file).is_err());
    }
    let error = Gguf::parse(with(STRING, &string("1"))).unwrap_err();
    assert_eq!(error.to_string(), "key `split.count`: expected u16, found string");
}

fn write_set(folder: &Folder, stem: &str, parts: &[Vec<u8>]) -> Vec<std::path::PathBuf> {
    let count = parts.len();
    let file = |(i, bytes): (usize, &Vec<u8>)| {
        folder.file(&format!("{stem}-{:05}-of-{count:05}.gguf", i + 1), bytes)
    };
    parts.iter().enumerate().map(file).collect()
}

#[test]
fn any_part_or_the_folder_opens_the_set() {
    let folder = Folder::new();
    // Letters outside ASCII, blanks, and a stem that looks like a part itself.
    for path in write_set(&folder, "模型 é-00001-of-00002", &three()) {
        check(&read(&path).unwrap());
        #[cfg(feature = "mmap")]
        check(&skep_gguf::open(&path).unwrap());
    }
    check(&read(folder.path()).unwrap());
}

#[test]
fn a_lone_part_of_one() {
    let folder = Folder::new();
    let path = folder.file("m-00001-of-00001.gguf", &part("x", 0, 1, 1, 9));
    assert_eq!(read(&path).unwrap().parts(), 1);
    assert_eq!(read(folder.path()).unwrap().parts(), 1);
}

#[test]
fn a_missing_part_is_named_before_loading() {
    let folder = Folder::new();
    let paths = write_set(&folder, "m", &three());
    std::fs::remove_file(&paths[2]).unwrap();
    let error = skep_gguf::open_with(&paths[1], |_| -> std::io::Result<Vec<u8>> {
        panic!("nothing is loaded when a part is missing")
    })
    .unwrap_err();
    assert_eq!(error.to_string(), format!("files of the set are missing: {}", paths[2].display()));
    assert!(matches!(read(folder.path()).unwrap_err().kind(), ErrorKind::MissingFiles { .. }));
}

#[test]
fn swapped_names_and_foreign_parts() {
    let folder = Folder::new();
    let mut parts = three();
    parts.swap(1, 2);
    let paths = write_set(&folder, "swapped", &parts);
    let error = read(&paths[0]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PartName { named: 2, number: 3 }), "{error}");
    assert_eq!(error.file(), paths[1].to_str());

    let mut parts = three();
    parts[2] = part("y", 2, 3, 9, 9);
    let paths = write_set(&folder, "mixed", &parts);
    let error = read(&paths[1]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::MixedParts { .. }), "{error}");
    assert_eq!(error.file(), paths[2].to_str());

    let path = folder.file("renamed.gguf", &three()[1]);
    let message = read(&path).unwrap_err().to_string();
    assert!(message.contains("`-00002-of-00003.gguf`"), "{message}");
}

#[test]
fn paths_that_lead_to_no_model() {
    let folder = Folder::new();
    let error = read(&folder.path().join("absent.gguf")).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFound), "{error}");
    assert!(error.to_string().ends_with("absent.gguf: file not found"), "{error}");
    let error = read(Path::new("models/foo.gguf")).unwrap_err();
    assert!(Path::new(error.file().unwrap()).is_absolute(), "{error}");

    let error = read(folder.path()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Folder { found } if found.is_empty()), "{error}");
    folder.file("b.gguf", &Raw::new().build());
    folder.file("notes.txt", b"");
    assert!(read(folder.path()).is_ok());
    write_set(&folder, "a", &three());
    let error = read(folder.path()).unwrap_err();
    assert!(
        error.to_string().ends_with("the folder holds 2 gguf files or sets: a in 3 parts, b.gguf"),
        "{error}"
    );
    #[cfg(unix)]
    {
        let error = read(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotAFile), "{error}");
    }
}

#[cfg(feature = "mmap")]
#[test]
fn maps_take_advice() {
    use skep_gguf::{Advice, Map};

    let folder = Folder::new();
    let path = folder.file("m.gguf", &part("x", 0, 1, 1, 9));
    let gguf = skep_gguf::open(&path).unwrap();
    gguf.advise(Advice::Random).unwrap();
    gguf.advise(Advice::WillNeed).unwrap();
    let map: &Map = gguf.part(0).unwrap();
    let length = map.as_ref().len();
    map.advise_range(Advice::Sequential, length - 1, 1).unwrap();
    assert!(map.advise_range(Advice::Normal, 1, length).is_err());
    assert!(map.advise_range(Advice::Normal, usize::MAX, 2).is_err());
    // Best effort: a system may know neither.
    let _ = map.advise(Advice::Populate);
    let _ = map.advise(Advice::HugePage);
    assert_eq!(gguf.data(&gguf.tensors()[0]), [9; 32]);
}
