//! The kernel language under NVIDIA's compiler, which needs no card.
#![cfg(feature = "cuda")]

use skep_hal::ErrorKind;
use skep_hal::gpu::{Source, cuda};

#[test]
fn kernels_compile_for_cards_that_are_not_here() {
    let source = Source { name: "rules", parts: &[include_str!("rules.gpu.h")], entries: &[] };
    for target in ["sm_75", "sm_90"] {
        match cuda::compile(source.name, &source.unit(), target) {
            Ok(object) => assert_eq!(&object[..4], b"\x7fELF"),
            Err(error) if matches!(error.kind(), ErrorKind::NoDriver { .. }) => {
                println!("skipped: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let error = cuda::compile("broken", "KERNEL(x, 32)() { no such thing; }", "sm_90").unwrap_err();
    assert!(error.to_string().starts_with("kernels broken for sm_90: "), "{error}");
}
