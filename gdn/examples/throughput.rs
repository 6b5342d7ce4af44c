//! Times one layer of Qwen3.6-35B-A3B's shape in both forms: `cargo run --release --example throughput [threads] [max tokens]`.

use std::time::Instant;

use skep_gdn::{Form, HeadOrder, Input, Scratch, Shape, Span, State, Weights, mix};
use skep_quant::Threads;

/// Deterministic values between -1 and 1.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as f32 / (1u32 << 31) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(2), |arg| arg.parse())?;
    let most = args.next().map_or(Ok(512), |arg| arg.parse())?;

    let shape = Shape::new(16, 32, 128, 128, 4, HeadOrder::Tiled)?;
    let conv = values(shape.conv_dim() * shape.conv_kernel(), 1);
    let a: Vec<f32> = values(shape.v_heads(), 2).iter().map(|x| -0.1 - x.abs()).collect();
    let dt_bias = values(shape.v_heads(), 3);
    let norm = values(shape.head_v_dim(), 4);
    let weights = Weights::new(&shape, &conv, &a, &dt_bias, &norm, 1e-6)?;
    let (qkv, z) = (values(most * shape.conv_dim(), 5), values(most * shape.value_dim(), 6));
    let (beta, alpha) = (values(most * shape.v_heads(), 7), values(most * shape.v_heads(), 8));
    let mut out = vec![0.0; most * shape.value_dim()];
    let mut scratch = Scratch::new();
    // As many layers as the model has, so that a state is not still in the cache when its turn comes again.
    let mut states: Vec<State> = (0..30).map(|_| State::new(&shape)).collect();
    println!("{threads} threads; microseconds per layer, tokens per second of one layer");
    println!("{:>7} {:>24} {:>24}", "tokens", "recurrent", "chunked");
    for tokens in [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512] {
        if tokens > most {
            break;
        }
        let input = Input {
            qkv: &qkv[..tokens * shape.conv_dim()],
            z: &z[..tokens * shape.value_dim()],
            beta: &beta[..tokens * shape.v_heads()],
            alpha: &alpha[..tokens * shape.v_heads()],
        };
        print!("{tokens:>7}");
        for form in [Form::Recurrent, Form::Chunked] {
            let mut times = Vec::new();
            let begin = Instant::now();
            while times.len() < 60 || begin.elapsed().as_millis() < 200 {
                for state in &mut states {
                    let start = Instant::now();
                    let mut spans = [Span { tokens: 0..tokens, state }];
                    let out = &mut out[..tokens * shape.value_dim()];
                    mix(&Threads(threads), &shape, &weights, &mut spans, &input, &mut scratch, form, out);
                    times.push(start.elapsed());
                }
            }
            times.sort_unstable();
            // The tenth of the calls that were disturbed least.
            let micros = times[times.len() / 10].as_secs_f64() * 1e6;
            print!(" {micros:>12.1} {:>11.0}", tokens as f64 / micros * 1e6);
        }
        println!();
    }
    assert!(states.iter().all(State::is_finite));
    Ok(())
}
