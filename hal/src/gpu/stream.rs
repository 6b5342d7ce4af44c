use super::{Device, EventHandle, GraphHandle, StreamHandle};
use crate::{Error, Result};

/// An order of work on a device: what is enqueued is done one after the other, later than the call.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: StreamHandle,
}

impl Stream {
    /// A new stream, which waits for no other.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device) -> Result<Self> {
        let handle = device.driver().stream_create()?;
        Ok(Self { device: device.clone(), handle })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// What the driver says, also of work enqueued earlier.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is ours and lives.
        unsafe { self.device.driver().stream_synchronize(self.handle) }
    }

    /// Lets later work here wait for an event of another stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles live.
        unsafe { self.device.driver().stream_wait(self.handle, event.handle) }
    }

    /// Records the work that `f` enqueues here, without doing it.
    ///
    /// Recorded work has its addresses fixed: the memory must live as long as the graph is launched. Allocating,
    /// synchronising and loading code inside is an error.
    ///
    /// # Errors
    /// The error of `f`, or what the driver says; the stream does work again afterwards.
    pub fn capture<E: From<Error>>(
        &self,
        f: impl FnOnce() -> core::result::Result<(), E>,
    ) -> core::result::Result<Graph, E> {
        let driver = self.device.driver();
        // SAFETY: the handle is ours and lives.
        unsafe { driver.capture_begin(self.handle) }?;
        let done = f();
        // SAFETY: as above.
        let graph = unsafe { driver.capture_end(self.handle) };
        let graph = graph.map(|handle| Graph { device: self.device.clone(), handle });
        done?;
        Ok(graph?)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and is not used again. There is nobody to tell of a failure.
        let _ = unsafe { self.device.driver().stream_destroy(self.handle) };
    }
}

/// A mark in a stream's work.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: EventHandle,
}

impl Event {
    /// An event for ordering streams.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device) -> Result<Self> {
        Self::create(device, false)
    }

    /// An event that also knows its time.
    ///
    /// # Errors
    /// What the driver says.
    pub fn timed(device: &Device) -> Result<Self> {
        Self::create(device, true)
    }

    fn create(device: &Device, timed: bool) -> Result<Self> {
        let handle = device.driver().event_create(timed)?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Marks what has been enqueued on a stream so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live.
        unsafe { self.device.driver().event_record(self.handle, stream.handle) }
    }

    /// Whether the work before the mark is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn done(&self) -> Result<bool> {
        // SAFETY: the handle lives.
        unsafe { self.device.driver().event_done(self.handle) }
    }

    /// Waits until the work before the mark is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle lives.
        unsafe { self.device.driver().event_synchronize(self.handle) }
    }

    /// Milliseconds from an earlier mark to this one; both are timed and done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn since(&self, earlier: &Self) -> Result<f32> {
        // SAFETY: both handles live.
        unsafe { self.device.driver().event_elapsed(earlier.handle, self.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and is not used again. There is nobody to tell of a failure.
        let _ = unsafe { self.device.driver().event_destroy(self.handle) };
    }
}

/// Recorded work, done again at every [`launch`](Self::launch).
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: GraphHandle,
}

impl Graph {
    /// Enqueues the recorded work.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The memory that the recorded work names must still be there, and may be written by it.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live; the memory is the caller's promise.
        unsafe { self.device.driver().graph_launch(self.handle, stream.handle) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and is not used again. There is nobody to tell of a failure.
        let _ = unsafe { self.device.driver().graph_destroy(self.handle) };
    }
}
