use super::{Driver, Module, Objects, Source};
use crate::Result;
use core::fmt;
use std::sync::Arc;

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two numbers that every driver knows")]
pub struct DeviceMemory {
    /// Not in use by anyone.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// An open device. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
}

struct Shared {
    driver: Box<dyn Driver>,
    objects: Objects,
}

impl Device {
    /// A device by its driver, with compiled kernels found and kept in the places that the environment names
    /// ([`Objects::from_env`]).
    pub fn new(driver: Box<dyn Driver>) -> Self {
        Self::with_objects(driver, Objects::from_env())
    }

    /// A device by its driver, with compiled kernels in given places.
    pub fn with_objects(driver: Box<dyn Driver>, objects: Objects) -> Self {
        Self { shared: Arc::new(Shared { driver, objects }) }
    }

    /// The driver.
    pub fn driver(&self) -> &dyn Driver {
        &*self.shared.driver
    }

    /// Loads the kernels of a source: from an object compiled ahead of time or kept from an earlier run, or compiled now.
    ///
    /// # Errors
    /// [`ErrorKind::Compile`](crate::ErrorKind::Compile), or what the driver says of loading; the message names source and
    /// architecture.
    pub fn module(&self, source: &Source) -> Result<Module> {
        Module::new(self.clone(), source, &self.shared.objects)
    }

    /// Whether both are the same device.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let driver = self.driver();
        f.debug_struct("Device")
            .field("driver", &driver.name())
            .field("name", &driver.device_name())
            .field("arch", &driver.caps().arch)
            .finish()
    }
}
