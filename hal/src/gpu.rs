//! One device API over CUDA, HIP and an emulated device.
//!
//! A [`Device`] owns memory ([`Memory`]), compiles and loads kernels ([`Source`], [`Module`]), and runs them in order on
//! [`Stream`]s, directly or replayed from a [`Graph`]. Which of the three [`Driver`]s is below makes no difference to the
//! code above. Drivers are loaded at run time: a machine without one gets an [`Error`](crate::Error) that says what was
//! looked for.
//!
//! Kernels are written in one language, `kernels/skep.gpu.h`, which CUDA, HIP and the host's C++ compiler understand.

mod caps;
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda;
mod device;
mod driver;
pub mod emulated;
mod memory;
mod module;
mod objects;
mod stream;
#[doc(hidden)]
pub mod testing;

pub use caps::{Arch, Caps, Dot4, Matrix};
pub use device::{Device, DeviceMemory};
pub use driver::{
    Driver, EventHandle, FunctionHandle, GraphHandle, Launch, ModuleHandle, Pointer, StreamHandle,
};
pub use memory::{HostMemory, Memory, View};
pub use module::{Args, Entry, Kernel, Module, Source};
pub use objects::Objects;
pub use stream::{Event, Graph, Stream};
