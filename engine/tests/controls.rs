//! Negative controls and broken files: what a wrong reading does to the numbers, and what the loader says.

mod common;

use common::edit::{Edited, Tensor, edited};
use common::{Array, Ids, load, logits, mean_kl, models};
use skep_engine::{ErrorKind, LoadOptions, Precision, Runner};

/// Divergence of a file from the reference logits of the bundled model.
fn divergence(file: &Edited) -> f64 {
    let reference = Array::read(&models().join("tiny-qwen35moe-Q4_K_M.logits.npy"));
    let ids = Ids::read(&models().join("tiny-qwen35moe-Q4_K_M.ids.json"));
    let mut runner = load(file.path(), Precision::Fast);
    mean_kl(&reference, &logits(&mut runner, &ids, 64), |_| true)
}

fn refusal(file: &Edited) -> (ErrorKind, String) {
    match Runner::load(file.path(), &LoadOptions::default(), &mut |_| {}) {
        Ok(_) => panic!("the file was loaded"),
        Err(error) => (error.kind(), error.to_string()),
    }
}

fn assert_refused(file: &Edited, words: &[&str]) {
    let (kind, message) = refusal(file);
    assert_eq!(kind, ErrorKind::Model, "{message}");
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

fn find<'t>(tensors: &'t mut [Tensor], name: &str) -> &'t mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn an_unchanged_copy_has_the_reference_logits() {
    let copy = edited("copy", &[], |_| {}, |_| {});
    assert!(divergence(&copy) <= 4e-5);
}

#[test]
fn the_marker_of_tiled_order_changes_nothing_and_grouped_order_is_wrong() {
    let marked = |name: &str, reordered: bool| {
        edited(
            name,
            &[],
            |writer| {
                writer.set("qwen35moe.ssm.v_head_reordered", reordered).unwrap();
            },
            |_| {},
        )
    };
    assert!(divergence(&marked("tiled", true)) <= 4e-5);
    let wrong = divergence(&marked("grouped", false));
    assert!(wrong > 0.1, "grouped order on a tiled file diverges by only {wrong}");
}

#[test]
fn adding_one_to_the_norms_is_wrong() {
    let shifted = edited(
        "norms",
        &[],
        |_| {},
        |tensors| {
            for tensor in tensors.iter_mut().filter(|tensor| tensor.name.ends_with("norm.weight")) {
                for value in tensor.floats() {
                    *value = (f32::from_le_bytes(*value) + 1.0).to_le_bytes();
                }
            }
        },
    );
    let wrong = divergence(&shifted);
    assert!(wrong > 0.1, "norms shifted by one diverge by only {wrong}");
}

/// The stack of the bundled model with layer 7 before layer 4: GDN, GDN, GDN, full, full, GDN, GDN, GDN.
fn irregular(name: &str, list: Option<Vec<bool>>) -> Edited {
    let order = |block: usize| match block {
        7 => 4,
        4..7 => block + 1,
        other => other,
    };
    let set = |writer: &mut skep_gguf::Writer| {
        if let Some(list) = list {
            writer.set("qwen35moe.attention.recurrent_layers", list).unwrap();
        }
    };
    edited(name, &["qwen35moe.attention.recurrent_layers"], set, |tensors| {
        for tensor in tensors {
            if let Some((block, role)) =
                tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'))
            {
                tensor.name = format!("blk.{}.{role}", order(block.parse().unwrap()));
            }
        }
    })
}

#[test]
fn the_tensors_decide_the_kind_of_a_layer() {
    let file = irregular("irregular", None);
    let runner = load(file.path(), Precision::Fast);
    let warnings = runner.info().warnings.join("; ");
    assert!(warnings.contains("[4, 7]"), "{warnings}");
    drop(runner);
    let list = [true, true, true, false, false, true, true, true, false];
    load(irregular("irregular-list", Some(list.to_vec())).path(), Precision::Fast);
}

#[test]
fn kinds_by_the_interval_contradict_an_irregular_stack() {
    let interval: Vec<bool> = (0..9).map(|layer| layer != 8 && (layer + 1) % 4 != 0).collect();
    assert_refused(&irregular("interval", Some(interval)), &["layer 4", "recurrent_layers"]);
}

#[test]
fn strange_and_missing_tensors_are_all_named() {
    let renamed = edited(
        "renamed",
        &[],
        |_| {},
        |tensors| {
            find(tensors, "blk.1.ssm_alpha.weight").name = "blk.1.ssm_alfa.weight".into();
            find(tensors, "blk.2.attn_norm.weight").name = "blk.2.attn_nrom.weight".into();
        },
    );
    assert_refused(&renamed, &["blk.1.ssm_alpha.weight", "blk.2.attn_norm.weight"]);
    let extra = edited(
        "extra",
        &[],
        |_| {},
        |tensors| {
            tensors.push(Tensor::new("blk.1.foo.weight", &[1.0]));
            tensors.push(Tensor::new("blk.0.ffn_down_exps.scale", &[1.0; 16]));
        },
    );
    assert_refused(&extra, &["blk.1.foo.weight", "blk.0.ffn_down_exps.scale"]);
}

#[test]
fn the_decay_bias_has_one_of_two_names() {
    let dt = "blk.0.ssm_dt.bias";
    let short = edited("dt", &[], |_| {}, |tensors| find(tensors, dt).name = "blk.0.ssm_dt".into());
    assert!(divergence(&short) <= 4e-5);
    let both = edited("dt-both", &[], |_| {}, |tensors| tensors.push(Tensor::new("blk.0.ssm_dt", &[0.0; 4])));
    assert_refused(&both, &["blk.0.ssm_dt", "two names"]);
    let neither = edited("dt-none", &[], |_| {}, |tensors| tensors.retain(|tensor| tensor.name != dt));
    assert_refused(&neither, &[dt]);
}

#[test]
fn decay_rates_must_be_negative() {
    let positive = edited(
        "decay",
        &[],
        |_| {},
        |tensors| {
            find(tensors, "blk.4.ssm_a").floats()[2] = 0.5_f32.to_le_bytes();
        },
    );
    assert_refused(&positive, &["blk.4.ssm_a", "0.5"]);
}

#[test]
fn head_counts_may_be_given_per_layer() {
    let key = "qwen35moe.attention.head_count_kv";
    let with = |name: &str, counts: Vec<u32>| {
        edited(
            name,
            &[key],
            |writer| {
                writer.set(key, counts).unwrap();
            },
            |_| {},
        )
    };
    assert!(divergence(&with("heads", vec![0, 0, 0, 2, 0, 0, 0, 2, 2])) <= 4e-5);
    assert_refused(&with("heads-two", vec![0, 0, 0, 2, 0, 0, 0, 1, 2]), &[key]);
}

#[test]
fn a_draft_block_may_be_announced_and_absent() {
    let stripped = edited(
        "stripped",
        &[],
        |_| {},
        |tensors| tensors.retain(|tensor| !tensor.name.starts_with("blk.8.")),
    );
    assert!(divergence(&stripped) <= 4e-5);
    let runner = load(stripped.path(), Precision::Fast);
    assert!(runner.info().warnings[0].contains("nextn_predict_layers"), "{:?}", runner.info().warnings);
    assert_eq!((runner.info().n_layers, runner.info().draft_bytes), (8, 0));
}

#[test]
fn a_file_of_only_a_draft_block_is_refused() {
    let draft = edited(
        "draft",
        &[],
        |_| {},
        |tensors| {
            tensors.retain(|tensor| !tensor.name.starts_with("blk.") || tensor.name.starts_with("blk.8."));
        },
    );
    assert_refused(&draft, &["only a draft block"]);
}

#[test]
fn fused_gate_and_up_experts_are_the_split_ones() {
    let fused = edited(
        "fused",
        &[],
        |_| {},
        |tensors| {
            for layer in 0..9 {
                let up = format!("blk.{layer}.ffn_up_exps.weight");
                let up = tensors.swap_remove(tensors.iter().position(|tensor| tensor.name == up).unwrap());
                let gate = find(tensors, &format!("blk.{layer}.ffn_gate_exps.weight"));
                let expert = gate.data.len() / 16;
                let both = gate.data.chunks(expert).zip(up.data.chunks(expert));
                gate.data = both.flat_map(|(gate, up)| [gate, up].concat()).collect();
                gate.shape[1] *= 2;
                gate.name = format!("blk.{layer}.ffn_gate_up_exps.weight");
            }
        },
    );
    assert!(divergence(&fused) <= 4e-5);
}

#[test]
fn a_tied_head_is_the_embedding() {
    let tied = edited("tied", &[], |_| {}, |tensors| tensors.retain(|tensor| tensor.name != "output.weight"));
    let wrong = divergence(&tied);
    assert!(
        wrong > 0.1,
        "the bundled model is not tied, yet the embedding as its head diverges by only {wrong}"
    );
}

#[test]
fn unknown_architectures_and_wrong_shapes_are_refused() {
    let other = edited(
        "architecture",
        &["general.architecture"],
        |writer| {
            writer.set("general.architecture", "llama").unwrap();
        },
        |_| {},
    );
    assert_refused(&other, &["architecture llama", "qwen35moe"]);
    let narrow = edited(
        "narrow",
        &["qwen35moe.expert_feed_forward_length"],
        |writer| {
            writer.set("qwen35moe.expert_feed_forward_length", 128_u32).unwrap();
        },
        |_| {},
    );
    assert_refused(&narrow, &["blk.0.ffn_gate_exps.weight", "128"]);
    let keyless = edited("keyless", &["qwen35moe.ssm.inner_size"], |_| {}, |_| {});
    assert_refused(&keyless, &["qwen35moe.ssm.inner_size"]);
}
