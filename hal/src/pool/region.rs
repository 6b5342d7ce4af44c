//! The protocol between the thread that runs a region and the workers that help.
//!
//! A region is one job, a body and a number of chunks. `open` counts the chunks nobody has claimed, `pending` those not
//! reported as ended. Whoever moves `open` down from a positive value owns one chunk **of the region open at that
//! moment**, and the region cannot end before that chunk is reported. A worker that slept through regions therefore
//! needs no sequence number: either its claim fails, or it succeeds and what it then reads is the current job. The
//! caller waits for chunks, not for workers; a worker that the system does not schedule holds nobody up unless it owns
//! a chunk.

use super::sync::{
    AtomicBool, AtomicIsize, AtomicUsize, Condvar, Mutex, Ordering, Pause, UnsafeCell, fence, lock, wait,
};
use core::any::Any;
use core::marker::PhantomData;
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

pub(crate) type Body<'a> = dyn Fn(usize) + Sync + 'a;
type Payload = Box<dyn Any + Send>;

/// How long an idle worker offers its processor before it parks, within a step and between steps. Within a step a wait
/// that long is no gap between two regions: the caller waits for something else.
const WITHIN_STEP: Duration = Duration::from_millis(10);
const BETWEEN_STEPS: Duration = Duration::from_micros(200);

/// The memory orderings on which the protocol rests, as a parameter so that the model test can weaken them one by one
/// and see the checker object.
pub(crate) trait Orders: 'static {
    /// The write to `open` that publishes the job.
    const PUBLISH: Ordering = Ordering::Release;
    /// The claim of a chunk, after which the job is read. Claims by others lie between it and the write, but a
    /// read-modify-write continues a release sequence.
    const CLAIM: Ordering = Ordering::Acquire;
    /// The report of ended chunks, after which the job may go away.
    const REPORT: Ordering = Ordering::Release;
    /// The caller's look at `pending`, after which it uses what the chunks wrote.
    const COLLECT: Ordering = Ordering::Acquire;
    /// Orders "publish, then look for sleepers" against "go to sleep, then look for work".
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// The orderings in use.
pub(crate) struct Sound;

impl Orders for Sound {}

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    chunks: usize,
}

/// Two cache lines, since x86 prefetches lines in pairs.
#[repr(align(128))]
struct Line<T>(T);

/// What a waiting worker looks at and, having claimed, needs.
struct Front {
    open: AtomicIsize,
    job: UnsafeCell<Job>,
}

/// What is seldom written, so that idle workers can keep it in their caches.
struct Gate {
    /// A step is in progress.
    entered: AtomicBool,
    closed: AtomicBool,
    /// Some worker may be parked that no wake-up has reached.
    asleep: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Payload>>,
    /// Number of wake-ups so far.
    wakes: Mutex<u64>,
    wake: Condvar,
}

pub(crate) struct Region<O = Sound> {
    front: Line<Front>,
    pending: Line<AtomicUsize>,
    busy: Line<AtomicBool>,
    gate: Line<Gate>,
    orders: PhantomData<O>,
}

// SAFETY: the only field that is not Send is `job`, a pointer to a body that is Sync; it is dereferenced only by a thread
// that owns an unreported chunk, during which `run` keeps the body borrowed.
unsafe impl<O> Send for Region<O> {}
// SAFETY: the only field that is not Sync is `job`. It is written by the holder of `busy` while no chunk is unreported and
// read by owners of unreported chunks, and the orderings of `Orders` put these after one another.
unsafe impl<O> Sync for Region<O> {}

impl<O: Orders> Region<O> {
    pub(crate) fn new() -> Self {
        let idle: &'static Body<'static> = &|_| {};
        Self {
            front: Line(Front {
                open: AtomicIsize::new(0),
                job: UnsafeCell::new(Job { body: idle, chunks: 0 }),
            }),
            pending: Line(AtomicUsize::new(0)),
            busy: Line(AtomicBool::new(false)),
            gate: Line(Gate {
                entered: AtomicBool::new(false),
                closed: AtomicBool::new(false),
                asleep: AtomicBool::new(false),
                panicked: AtomicBool::new(false),
                panic: Mutex::new(None),
                wakes: Mutex::new(0),
                wake: Condvar::new(),
            }),
            orders: PhantomData,
        }
    }

    /// A step begins: workers come to the gate and stay there.
    pub(crate) fn begin_step(&self) {
        self.gate.0.entered.store(true, Ordering::Relaxed);
        self.wake_sleepers();
    }

    pub(crate) fn end_step(&self) {
        self.gate.0.entered.store(false, Ordering::Relaxed);
    }

    /// Sends every worker home.
    pub(crate) fn close(&self) {
        self.gate.0.closed.store(true, Ordering::Relaxed);
        self.wake_all();
    }

    /// Calls `body` once for each of `0..chunks` and returns when all calls have returned; serially if a region is
    /// already running. Resumes the first panic of a chunk, after all chunks have run.
    pub(crate) fn run(&self, chunks: usize, body: &Body<'_>) {
        let open = isize::try_from(chunks).expect("at most isize::MAX chunks");
        if chunks <= 1 || self.busy.0.swap(true, Ordering::Acquire) {
            return serial(chunks, body);
        }
        // SAFETY: only the lifetime changes. The pointer is used by owners of unreported chunks alone, and this function
        // does not return before every chunk has been reported.
        let body = unsafe { core::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        self.front.0.job.with_mut(|job| {
            // SAFETY: `busy` keeps other writers out, and readers own a chunk of a region that has not ended: none here.
            unsafe { *job = Job { body, chunks } }
        });
        self.pending.0.store(chunks, Ordering::Relaxed);
        // Workers that come late may still be taking it below zero. A store would do; loom, however, knows the order of
        // two concurrent writes only if both are read-modify-writes.
        self.front.0.open.swap(open, O::PUBLISH);
        self.wake_sleepers();

        // Nothing between publication and the end of the wait may unwind.
        self.work();
        let mut pause = Pause::new();
        while self.pending.0.load(O::COLLECT) != 0 {
            pause.wait();
        }

        let panic = self.take_panic();
        self.busy.0.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// A worker's life.
    pub(crate) fn serve(&self) {
        let gate = &self.gate.0;
        let mut pause = Pause::new();
        while !gate.closed.load(Ordering::Relaxed) {
            if self.work() {
                pause = Pause::new();
                continue;
            }
            let patience = if gate.entered.load(Ordering::Relaxed) { WITHIN_STEP } else { BETWEEN_STEPS };
            if !pause.wait_within(patience) {
                self.sleep();
                pause = Pause::new();
            }
        }
    }

    /// Runs chunks of the open region until none is left; says whether there was one.
    fn work(&self) -> bool {
        // Chunks ended and not yet reported. They hold the region open, so that all claims here are of one region.
        let mut ended = 0;
        while let Some((job, index)) = self.claim() {
            // SAFETY: this thread owns an unreported chunk of the job's region, so that its `run` has not returned.
            let body = unsafe { &*job.body };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body(index))) {
                self.keep_panic(payload);
            }
            ended += 1;
        }
        if ended != 0 {
            self.pending.0.fetch_sub(ended, O::REPORT);
        }
        ended != 0
    }

    fn claim(&self) -> Option<(Job, usize)> {
        let Front { open, job } = &self.front.0;
        // Looking first keeps the line shared while there is nothing to do, and `open` from falling without end.
        if open.load(Ordering::Relaxed) <= 0 {
            return None;
        }
        let left = usize::try_from(open.fetch_sub(1, O::CLAIM)).ok().filter(|&left| left != 0)?;
        let job = job.with(|job| {
            // SAFETY: the claim succeeded, so that the job is published and stays until this chunk is reported.
            unsafe { *job }
        });
        Some((job, job.chunks - left))
    }

    fn sleep(&self) {
        let gate = &self.gate.0;
        let mut wakes = lock(&gate.wakes);
        let seen = *wakes;
        gate.asleep.store(true, Ordering::Relaxed);
        O::fence();
        while *wakes == seen
            && self.front.0.open.load(Ordering::Relaxed) <= 0
            && !gate.closed.load(Ordering::Relaxed)
        {
            wakes = wait(&gate.wake, wakes);
        }
    }

    fn wake_sleepers(&self) {
        O::fence();
        if self.gate.0.asleep.load(Ordering::Relaxed) {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        let gate = &self.gate.0;
        let mut wakes = lock(&gate.wakes);
        *wakes = wakes.wrapping_add(1);
        gate.asleep.store(false, Ordering::Relaxed);
        drop(wakes);
        gate.wake.notify_all();
    }

    #[cold]
    fn keep_panic(&self, payload: Payload) {
        let mut first = lock(&self.gate.0.panic);
        if first.is_none() {
            *first = Some(payload);
            self.gate.0.panicked.store(true, Ordering::Relaxed);
        } else {
            discard(payload);
        }
    }

    fn take_panic(&self) -> Option<Payload> {
        if !self.gate.0.panicked.load(Ordering::Relaxed) {
            return None;
        }
        self.gate.0.panicked.store(false, Ordering::Relaxed);
        lock(&self.gate.0.panic).take()
    }
}

/// All chunks on this thread, with the panic rule of a region.
pub(crate) fn serial(chunks: usize, body: &Body<'_>) {
    let mut first = None;
    for index in 0..chunks {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body(index))) {
            match first {
                None => first = Some(payload),
                Some(_) => discard(payload),
            }
        }
    }
    if let Some(payload) = first {
        resume_unwind(payload);
    }
}

/// Drops a payload whose destructor may panic in turn, as nothing may while chunks are unreported.
fn discard(payload: Payload) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        core::mem::forget(again);
    }
}
