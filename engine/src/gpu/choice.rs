use crate::error::{Error, ErrorKind, Result};
use skep_hal::gpu::{Device, cuda, emulated};

/// What a model runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The first device that is there and has room for the model; the CPU if there is none.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA card.
    Cuda,
    /// An AMD card or APU.
    Hip,
    /// The emulated device: the kernels of the others, run by the CPU. For tests.
    Emulated,
}

impl DeviceKind {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Emulated => "emulated",
        }
    }
}

/// Opens a device; `None` is the CPU.
pub(crate) fn open(kind: DeviceKind) -> Result<Option<Device>> {
    let named = |device: skep_hal::Result<Device>| device.map(Some).map_err(Error::from);
    match kind {
        DeviceKind::Cpu => Ok(None),
        DeviceKind::Emulated => named(emulated::open(&emulated::Options::default())),
        DeviceKind::Cuda => named(cuda::open(0)),
        DeviceKind::Hip => Err(Error::new(ErrorKind::Device, "this build has no driver for hip")),
        // No card is no failure here.
        DeviceKind::Auto => Ok(cuda::open(0).ok()),
    }
}
