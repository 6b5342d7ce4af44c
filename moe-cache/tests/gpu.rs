//! Routing and experts on devices, against the CPU's router and the scalar feed-forward.
#![cfg(all(feature = "gpu", feature = "cpu"))]

use skep_hal::gpu::testing::devices;
use skep_hal::gpu::{Device, Memory, Stream};
use skep_moe_cache::cpu::{Activation, Bank, Experts};
use skep_moe_cache::gpu::{DeviceExperts, DeviceRoutes, DeviceScratch, GateUp, Kernels};
use skep_moe_cache::reference;
use skep_moe_cache::router::{self, Norm, Options, Routes};
use skep_quant::Type;
use skep_quant::gpu::{Acts, Gate, Matrix};

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn number(&mut self) -> f32 {
        self.bits() as f32 / (1_u32 << 30) as f32 - 1.0
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.number()).collect()
    }

    fn weights(&mut self, ty: Type, rows: usize, cols: usize) -> Vec<u8> {
        let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
        let mut bytes = Vec::new();
        while bytes.len() < rows * ty.row_bytes(cols).unwrap() {
            let mut block: Vec<u8> = (0..ty.block_bytes()).map(|_| self.bits() as u8).collect();
            let scale = half(0.004 * (1.5 + self.number()));
            match ty {
                Type::F32 => block.copy_from_slice(&(0.1 * self.number()).to_le_bytes()),
                Type::F16 => block.copy_from_slice(&half(0.1 * self.number())),
                Type::Q6_K => block[208..].copy_from_slice(&half(0.0002)),
                Type::Q4_K => {
                    block[..2].copy_from_slice(&half(0.0005));
                    block[2..4].copy_from_slice(&half(0.003));
                }
                _ => block[..2].copy_from_slice(&scale),
            }
            bytes.extend(block);
        }
        bytes
    }
}

struct Bench {
    device: Device,
    stream: Stream,
    kernels: Kernels,
    quant: skep_quant::gpu::Kernels,
}

fn everywhere(test: impl Fn(&Bench)) {
    for device in devices() {
        let stream = Stream::new(&device).unwrap();
        let kernels = Kernels::load(&device).unwrap();
        let quant = skep_quant::gpu::Kernels::load(&device).unwrap();
        test(&Bench { device, stream, kernels, quant });
    }
}

fn route(
    bench: &Bench,
    logits: &[f32],
    experts: usize,
    k: usize,
    options: &Options<'_>,
) -> (Vec<u32>, Vec<f32>) {
    let n = logits.len() / experts;
    let stream = &bench.stream;
    let routes = DeviceRoutes::new(&bench.device, n, k).unwrap();
    let memory = Memory::of(stream, logits).unwrap();
    let scale = options.expert_scale.map(|scale| Memory::of(stream, scale).unwrap());
    let view = scale.as_ref().map(Memory::view);
    bench.kernels.route(stream, memory.view(), n, experts, k, options, view, &routes).unwrap();
    let (mut ids, mut weights) = (vec![0; n * k], vec![0.0; n * k]);
    routes.ids().download(stream, &mut ids).unwrap();
    routes.weights().download(stream, &mut weights).unwrap();
    (ids, weights)
}

#[test]
fn tokens_are_routed_as_by_the_cpu() {
    everywhere(|bench| {
        let mut random = Random(1);
        for (n, experts, k) in
            [(1, 1, 1), (3, 4, 2), (5, 16, 4), (7, 128, 8), (2, 256, 8), (3, 333, 10), (1, 512, 32)]
        {
            let scale = random.numbers(experts);
            for (quantum, options) in [
                (0.0, Options::default()),
                (0.0, Options::default().with_norm(Norm::Full)),
                (0.0, Options::default().with_expert_scale(&scale)),
                // Many ties.
                (2.0, Options::default()),
            ] {
                let mut logits: Vec<f32> = random.numbers(n * experts).iter().map(|x| 4.0 * x).collect();
                if quantum > 0.0 {
                    logits.iter_mut().for_each(|x| *x = (*x / quantum).round() * quantum);
                    if experts > k {
                        logits[0] = f32::NEG_INFINITY;
                    }
                }
                let mut want = Routes::new();
                router::route(&logits, experts, k, &options, &mut want).unwrap();
                let (ids, weights) = route(bench, &logits, experts, k, &options);
                assert_eq!(ids, want.experts(), "{n} {experts} {k}");
                for (found, want) in weights.iter().zip(want.weights()) {
                    assert!((found - want).abs() <= 2e-6 * want.abs() + 1e-9, "{found} {want}");
                }
            }
        }
    });
}

#[test]
fn logits_that_are_not_finite_show_in_the_weights_and_lead_nowhere_else() {
    everywhere(|bench| {
        let mut random = Random(2);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut logits = random.numbers(3 * 40);
            if bad == f32::NEG_INFINITY {
                logits[40..80].fill(bad);
            } else {
                logits[40 + 33] = bad;
            }
            let (ids, weights) = route(bench, &logits, 40, 4, &Options::default());
            assert!(ids.iter().all(|&id| id < 40));
            assert!(weights[4..8].iter().all(|w| w.is_nan()), "{bad}: {weights:?}");
            assert!(weights[..4].iter().chain(&weights[8..]).all(|w| w.is_finite()));
        }
    });
}

#[derive(Clone, Copy)]
struct Case {
    types: [Type; 3],
    fused: bool,
    n: usize,
    experts: usize,
    k: usize,
    hidden: usize,
    ff: usize,
    /// All tokens choose the first experts.
    crowded: bool,
}

/// What the device makes of a case, and the truth; with `slots`, experts lie in other places, or are said to.
fn case(bench: &Bench, case: Case, moved: bool, told: bool) -> f32 {
    let Case { types, fused, n, experts, k, hidden, ff, crowded } = case;
    let Bench { device, stream, kernels, quant } = bench;
    let mut random = Random(n as u64 + 77);
    let gate_up = if fused {
        vec![random.weights(types[0], experts * 2 * ff, hidden)]
    } else {
        types[..2].iter().map(|&ty| random.weights(ty, experts * ff, hidden)).collect()
    };
    let down = random.weights(types[2], experts * hidden, ff);
    let (x, add) = (random.numbers(n * hidden), random.numbers(n * hidden));
    let ids: Vec<u32> = (0..n)
        .flat_map(|token| {
            let start = if crowded { 0 } else { random.bits() as usize + token };
            (0..k).map(move |j| ((start + j * (experts / k)) % experts) as u32)
        })
        .collect();
    let weights = random.numbers(n * k);

    let bank = |ty, rows, cols, bytes| Bank::new(ty, experts, rows, cols, bytes).unwrap();
    let (gelu, silu) = (Activation::GeluTanh, Activation::Silu);
    let (on_host, gate) = if fused {
        (
            Experts::fused(
                bank(types[0], 2 * ff, hidden, &gate_up[0]),
                bank(types[2], hidden, ff, &down),
                gelu,
            ),
            Gate::Gelu,
        )
    } else {
        let (gate, up) = (bank(types[0], ff, hidden, &gate_up[0]), bank(types[1], ff, hidden, &gate_up[1]));
        (Experts::new(gate, up, bank(types[2], hidden, ff, &down), silu), Gate::Silu)
    };
    let routes = Routes::from_parts(k, ids.clone(), weights.clone()).unwrap();
    let want = reference::experts(&on_host.unwrap(), &x, &routes);

    // Expert e lies in slot (3 e + 1) mod experts.
    let slot = |expert: usize| if moved { (3 * expert + 1) % experts } else { expert };
    let upload = |ty: Type, rows: usize, cols: usize, bytes: &[u8]| {
        let mut placed = bytes.to_vec();
        let len = bytes.len() / experts;
        for (expert, bytes) in bytes.chunks_exact(len).enumerate() {
            placed[slot(expert) * len..][..len].copy_from_slice(bytes);
        }
        Matrix::upload(stream, ty, rows, cols, experts, &placed).unwrap()
    };
    let on_device = DeviceExperts::new(
        if fused {
            GateUp::Fused(upload(types[0], 2 * ff, hidden, &gate_up[0]))
        } else {
            GateUp::Split {
                gate: upload(types[0], ff, hidden, &gate_up[0]),
                up: upload(types[1], ff, hidden, &gate_up[1]),
            }
        },
        upload(types[2], hidden, ff, &down),
        gate,
    );
    let slots: Vec<u32> = (0..experts).map(|expert| slot(expert) as u32).collect();
    let slots = Memory::of(stream, &slots).unwrap();
    let on_device_routes = DeviceRoutes::new(device, n, k).unwrap();
    on_device_routes.ids().upload(stream, &ids).unwrap();
    on_device_routes.weights().upload(stream, &weights).unwrap();
    let input = Memory::of(stream, &x).unwrap();
    let acts = Acts::new(device, n, hidden).unwrap();
    quant.quantise(stream, input.view(), n, hidden, &acts).unwrap();
    let scratch = DeviceScratch::new(device, n, k, experts, ff, hidden).unwrap();
    let out = Memory::of(stream, &add).unwrap();
    let mut worst = 0.0_f32;
    let size = want.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for adds in [true, false] {
        let slots = told.then(|| slots.view());
        kernels
            .experts(
                stream,
                quant,
                &on_device,
                slots,
                &acts,
                &on_device_routes,
                n,
                &scratch,
                out.view(),
                adds,
            )
            .unwrap();
        let mut found = vec![0.0; n * hidden];
        out.view().download(stream, &mut found).unwrap();
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            let want = if adds { want + add[i] } else { *want };
            let off = (found - want).abs() / size;
            worst = if off.is_nan() { f32::INFINITY } else { worst.max(off) };
        }
    }
    worst
}

const CASE: Case = Case {
    types: [Type::Q4_K, Type::Q4_K, Type::Q6_K],
    fused: false,
    n: 1,
    experts: 8,
    k: 4,
    hidden: 256,
    ff: 256,
    crowded: false,
};

#[test]
fn experts_match_the_reference_for_few_and_many_tokens() {
    everywhere(|bench| {
        for n in [1, 3, 8, 9, 40] {
            let off = case(bench, Case { n, ..CASE }, false, false);
            assert!(off < 0.02, "{n}: {off}");
        }
    });
}

#[test]
fn types_forms_and_widths_mix() {
    everywhere(|bench| {
        for n in [2, 11] {
            for (types, fused) in [
                ([Type::Q4_0, Type::Q4_0, Type::Q8_0], true),
                ([Type::Q8_0, Type::Q5_0, Type::Q5_0], false),
                ([Type::F16, Type::Q8_0, Type::F32], false),
            ] {
                let odd = Case { types, fused, n, experts: 5, k: 2, hidden: 64, ff: 96, crowded: false };
                let off = case(bench, odd, false, false);
                assert!(off < 0.02, "{types:?} {n}: {off}");
            }
        }
    });
}

#[test]
fn crowded_experts_and_unused_ones_are_fine() {
    everywhere(|bench| {
        let crowded = Case { n: 70, experts: 16, k: 1, hidden: 32, ff: 32, crowded: true, ..CASE };
        let crowded = Case { types: [Type::Q8_0; 3], ..crowded };
        let off = case(bench, crowded, false, false);
        assert!(off < 0.02, "{off}");
    });
}

#[test]
fn experts_are_found_by_their_slots() {
    everywhere(|bench| {
        for n in [2, 12] {
            let small = Case { n, hidden: 64, ff: 64, types: [Type::Q8_0; 3], ..CASE };
            let off = case(bench, small, true, true);
            assert!(off < 0.02, "{n}: {off}");
            let lost = case(bench, small, true, false);
            assert!(lost > 0.2, "a wrong slot table must show: {lost}");
        }
    });
}
