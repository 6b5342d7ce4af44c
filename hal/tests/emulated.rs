//! The emulated device: orders, waves, rules of the kernel language, capture, errors.
#![cfg(all(feature = "gpu", target_arch = "x86_64", target_os = "linux"))]

use skep_hal::ErrorKind;
use skep_hal::gpu::emulated::{self, Options, Order};
use skep_hal::gpu::{Args, Device, Entry, Kernel, Memory, Objects, Source, Stream};

const KERNELS: Source = Source {
    name: "rules",
    parts: &[include_str!("rules.gpu.h")],
    entries: &[
        Entry { name: "reversed_sums", threads: 128 },
        Entry { name: "racy", threads: 128 },
        Entry { name: "half_barrier", threads: 128 },
        Entry { name: "half_shuffle", threads: 128 },
        Entry { name: "unwritten_shared", threads: 128 },
        Entry { name: "too_much_shared", threads: 128 },
        Entry { name: "misaligned", threads: 128 },
        Entry { name: "products", threads: 128 },
        Entry { name: "counts", threads: 128 },
        Entry { name: "lanes", threads: 128 },
        Entry { name: "wrong_threads", threads: 64 },
        Entry { name: "not_exported", threads: 64 },
    ],
};

const ORDERS: [Order; 4] = [Order::Forward, Order::Reverse, Order::Random(1), Order::Random(2)];

fn device(wave: u32, order: Order) -> Device {
    let mut options = Options::default();
    options.wave = wave;
    options.order = order;
    emulated::open_with(&options, Objects::from_env()).unwrap()
}

fn everywhere(test: impl Fn(&Device, &Stream, &dyn Fn(&'static str) -> Kernel)) {
    for wave in [32, 64] {
        for order in ORDERS {
            let device = device(wave, order);
            let module = device.module(&KERNELS).unwrap();
            let stream = Stream::new(&device).unwrap();
            test(&device, &stream, &|name| module.kernel(name).unwrap());
        }
    }
}

fn launch(kernel: &Kernel, stream: &Stream, grid: u32, args: &Args) -> skep_hal::Result<()> {
    // SAFETY: the kernels of this file stay within what they are given.
    unsafe { kernel.launch(stream, [grid, 1, 1], args) }
}

#[test]
fn barriers_and_sums_work_in_every_order() {
    everywhere(|device, stream, kernel| {
        let n = 1000_usize;
        let x: Vec<f32> = (0..n).map(|i| (i * i % 97) as f32).collect();
        let (from, to) = (Memory::of(stream, &x).unwrap(), Memory::new(device, 4 * n).unwrap());
        let args = Args::new().view(from.view()).view(to.view()).f32(2.0).len(n);
        launch(&kernel("reversed_sums"), stream, n.div_ceil(128) as u32, &args).unwrap();
        let mut y = vec![0.0; n];
        to.view().download(stream, &mut y).unwrap();
        let wave = device.driver().caps().wave as usize;
        for (i, y) in y.iter().enumerate() {
            let (block, waves) = (i / 128, 128 / wave);
            let from = block * 128 + (waves - 1 - i % 128 / wave) * wave;
            let sum: f32 = (from..from + wave).map(|i| x.get(i).copied().unwrap_or(0.0)).sum();
            assert_eq!(*y, 2.0 * sum, "{i}");
        }
    });
}

#[test]
fn a_missing_barrier_shows() {
    everywhere(|device, stream, kernel| {
        let to = Memory::new(device, 4 * 128).unwrap();
        launch(&kernel("racy"), stream, 1, &Args::new().view(to.view())).unwrap();
        let mut y = vec![0_u32; 128];
        to.view().download(stream, &mut y).unwrap();
        assert!(y.iter().enumerate().any(|(i, &y)| y != 127 - i as u32), "{:?}", device.driver().caps());
    });
}

#[test]
fn broken_rules_are_errors_that_name_the_kernel() {
    for (name, says) in [
        ("half_barrier", "a barrier that not all threads of the block reach"),
        ("half_shuffle", "a shuffle or wave barrier that not all lanes of the wave reach"),
        ("too_much_shared", "more than 64 KiB of shared memory"),
        ("misaligned", "a load from an address that is not a multiple of its width"),
    ] {
        everywhere(|device, stream, kernel| {
            let to = Memory::new(device, 4 * 128).unwrap();
            let kernel = kernel(name);
            let error = launch(&kernel, stream, 1, &Args::new().view(to.view())).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Kernel { .. }), "{error}");
            let text = error.to_string();
            assert!(text.starts_with(&format!("kernel {name}: {says} (block 0 of grid [1, 1, 1]")), "{text}");
            // The device works on.
            launch(&kernel, stream, 0, &Args::new()).unwrap();
            let bytes = Memory::zeroed(stream, 16).unwrap();
            bytes.view().download(stream, &mut [0_u8; 16]).unwrap();
        });
    }
}

#[test]
fn memory_nobody_wrote_is_poison() {
    everywhere(|device, stream, kernel| {
        let to = Memory::new(device, 4 * 128).unwrap();
        let mut y = vec![0.0_f32; 128];
        to.view().download(stream, &mut y).unwrap();
        assert!(y.iter().all(|y| y.is_nan()));
        to.view().fill(stream, 0).unwrap();
        for _ in 0..2 {
            launch(&kernel("unwritten_shared"), stream, 9, &Args::new().view(to.view())).unwrap();
            to.view().download(stream, &mut y).unwrap();
            assert!(y.iter().all(|y| y.is_nan()));
        }
    });
}

#[test]
fn matrix_products_are_exact_on_small_numbers() {
    everywhere(|device, stream, kernel| {
        let number = |i: usize| (i * 7 % 13) as f32 - 6.0;
        let half = |x: f32| half::f16::from_f32(x).to_bits();
        let a: Vec<u16> = (0..256).map(|i| half(number(i))).collect();
        let b: Vec<u16> = (0..256).map(|i| half(number(i + 5))).collect();
        let (a, b) = (Memory::of(stream, &a).unwrap(), Memory::of(stream, &b).unwrap());
        let to = Memory::new(device, 4 * 256).unwrap();
        let args = Args::new().view(a.view()).view(b.view()).view(to.view());
        launch(&kernel("products"), stream, 1, &args).unwrap();
        let mut c = vec![0.0_f32; 256];
        to.view().download(stream, &mut c).unwrap();
        for (i, c) in c.iter().enumerate() {
            let (row, col) = (i / 16, i % 16);
            let want: f32 = (0..16).map(|k| number(row * 16 + k) * number(col * 16 + k + 5)).sum();
            assert_eq!(*c, want, "{row} {col}");
        }
    });
}

#[test]
fn atomics_count_every_thread() {
    everywhere(|_, stream, kernel| {
        let counter = Memory::zeroed(stream, 16).unwrap();
        launch(&kernel("counts"), stream, 333, &Args::new().view(counter.view())).unwrap();
        let mut count = [0_u32; 3];
        counter.view().download(stream, &mut count).unwrap();
        assert_eq!(count[0], 333 * 128);
        assert_eq!(f32::from_bits(count[1]), (333 * 128) as f32);
    });
}

#[test]
fn lanes_talk() {
    everywhere(|device, stream, kernel| {
        let to = Memory::new(device, 4 * 128 * 4).unwrap();
        launch(&kernel("lanes"), stream, 1, &Args::new().view(to.view())).unwrap();
        let mut y = vec![0_u32; 128 * 4];
        to.view().download(stream, &mut y).unwrap();
        let wave = device.driver().caps().wave;
        for i in 0..128_u32 {
            let row = &y[4 * i as usize..][..4];
            let lane = i % wave;
            assert_eq!(row[0], i - lane + (lane ^ 5));
            assert_eq!(row[1], i - lane + 3);
            assert_eq!(row[2], wave / 2, "lanes with an odd number");
            assert_eq!(row[3], (lane / 8 * 8..lane / 8 * 8 + 8).sum::<u32>());
        }
    });
}

#[test]
fn captured_work_is_done_at_launch_and_only_then() {
    let device = device(32, Order::Forward);
    let stream = Stream::new(&device).unwrap();
    let kernel = device.module(&KERNELS).unwrap().kernel("counts").unwrap();
    let counter = Memory::zeroed(&stream, 16).unwrap();
    let read = || {
        let mut count = [0_u32];
        counter.view().download(&stream, &mut count).unwrap();
        count[0]
    };
    let graph = stream
        .capture::<skep_hal::Error>(|| {
            (0..3).try_for_each(|_| launch(&kernel, &stream, 1, &Args::new().view(counter.view())))
        })
        .unwrap();
    assert_eq!(read(), 0);
    for times in 1..=3 {
        // SAFETY: the counter lives.
        unsafe { graph.launch(&stream) }.unwrap();
        assert_eq!(read(), times * 3 * 128);
    }
}

#[test]
fn capture_has_rules_and_ends_well() {
    let device = device(32, Order::Forward);
    let stream = Stream::new(&device).unwrap();
    let failed = stream.capture::<skep_hal::Error>(|| Memory::new(&device, 16).map(drop)).unwrap_err();
    assert_eq!(
        failed.to_string(),
        "alloc on emulated failed: refused (1): not allowed while a stream is captured"
    );
    stream.capture::<skep_hal::Error>(|| stream.synchronize()).unwrap_err();
    stream.synchronize().unwrap();
    Memory::new(&device, 16).unwrap();
}

#[test]
fn arguments_and_declarations_are_compared_with_the_code() {
    let device = device(32, Order::Forward);
    let stream = Stream::new(&device).unwrap();
    let module = device.module(&KERNELS).unwrap();
    let kernel = module.kernel("counts").unwrap();
    let error = launch(&kernel, &stream, 1, &Args::new().u32(1)).unwrap_err();
    assert_eq!(error.to_string(), "kernel counts: takes arguments of [8] bytes, was given [4]");
    launch(&kernel, &stream, 1, &Args::new()).unwrap_err();
    let says = |name| module.kernel(name).unwrap_err().to_string();
    assert_eq!(
        says("wrong_threads"),
        "kernel wrong_threads: made for blocks of 128 threads, declared with 64"
    );
    assert_eq!(says("not_exported"), "kernel not_exported: not exported by its source");
    assert_eq!(says("absent"), "kernel absent: not an entry of source rules");
}

#[test]
fn memory_is_counted() {
    let mut options = Options::default();
    options.memory = 1 << 20;
    let device = emulated::open_with(&options, Objects::none()).unwrap();
    let held = Memory::new(&device, 1 << 19).unwrap();
    let error = Memory::new(&device, (1 << 19) + 1).unwrap_err();
    assert_eq!(error.to_string(), "cannot allocate 524289 bytes on emulated (524288 bytes free)");
    drop(held);
    Memory::new(&device, 1 << 20).unwrap();
}

#[test]
fn a_text_that_does_not_compile_is_one_error() {
    let device = emulated::open_with(&Options::default(), Objects::none()).unwrap();
    let source = Source { name: "broken", parts: &["KERNEL(broken, 32)() { no such thing; }"], entries: &[] };
    let error = device.module(&source).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Compile { .. }), "{error}");
    assert!(error.to_string().starts_with("kernels broken for the emulated device"), "{error}");
}

#[test]
fn waves_of_other_widths_are_refused() {
    let mut options = Options::default();
    options.wave = 16;
    let error = emulated::open(&options).unwrap_err();
    assert_eq!(error.to_string(), "no emulated device: waves have 32 or 64 lanes, not 16");
}
