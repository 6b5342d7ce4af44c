//! The devices that kernels are tested on.

use super::Device;
use super::emulated::{self, Options, Order};
use std::env;

/// Three emulated devices that differ in wave width and order of threads; or the one device that `$SKEP_TEST_DEVICE` names.
///
/// # Panics
/// If there is no such device.
pub fn devices() -> Vec<Device> {
    match env::var("SKEP_TEST_DEVICE").as_deref() {
        Err(_) | Ok("emulated") => [(32, Order::Forward), (64, Order::Reverse), (32, Order::Random(7))]
            .map(|(wave, order)| {
                emulated::open(&Options { wave, order, ..Options::default() }).expect("the emulated device")
            })
            .into(),
        #[cfg(feature = "cuda")]
        Ok("cuda") => vec![super::cuda::open(0).expect("a CUDA device")],
        Ok(other) => panic!("SKEP_TEST_DEVICE={other} is no device"),
    }
}
