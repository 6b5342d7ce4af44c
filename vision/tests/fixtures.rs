//! The pictures beside the small model: their sizes and the soft tokens they take.
#![cfg(feature = "decode")]

use std::fs;

use skep_quant::Serial;
use skep_vision::{Budget, Limits, Tiling, decode};

#[test]
fn pictures_take_the_tokens_they_were_trained_with() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/vision");
    let Ok(cases) = fs::read_to_string(format!("{folder}/cases.json")) else {
        println!("skipped: {folder} is not here");
        return;
    };
    let mut seen = 0;
    for case in cases.split("\"image\": \"").skip(1) {
        let name = case.split('"').next().unwrap();
        let number = |text: &str| {
            text.split(|c: char| !c.is_ascii_digit()).find(|t| !t.is_empty()).unwrap().parse().unwrap()
        };
        let after = |key: &str| case.split_once(key).unwrap().1;
        let width: usize = number(after("\"size\""));
        let height: usize = number(after("\"size\"").split_once(',').unwrap().1);
        let tokens: usize = number(after("\"soft_tokens\""));

        let picture = decode(&fs::read(format!("{folder}/{name}")).unwrap(), &Limits::default()).unwrap();
        assert_eq!((picture.width(), picture.height()), (width, height), "{name}");
        assert_eq!(Tiling::GEMMA4V.soft_tokens(width, height, Budget::default()), Ok(tokens), "{name}");
        let patches = Tiling::GEMMA4V.cut(&Serial, &picture, Budget::default()).unwrap();
        assert_eq!(patches.columns() * patches.rows(), 9 * tokens, "{name}");
        seen += 1;
    }
    assert!(seen >= 21, "{seen} pictures");
}
