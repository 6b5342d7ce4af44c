//! Resident memory of the process, alone in its process: other tests would allocate and free meanwhile.

use skep_hal::memory::{peak_resident, resident};

#[test]
fn resident_memory_follows_what_is_touched() {
    let Some(before) = resident() else { return };
    let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
    let after = resident().expect("was there a moment ago");
    let peak = peak_resident().expect("beside the other");
    drop(std::hint::black_box(touched));
    assert!(after >= before + (48 << 20), "{before} -> {after}");
    assert!(peak >= after, "{peak} < {after}");
}
