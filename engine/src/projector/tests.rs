use super::*;
use skep_gguf::{TensorType, Writer};
use skep_quant::{Serial, Threads};
use skep_vision::{Activation, Limits, Patches};
use std::path::PathBuf;

fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared").join(name);
    if !path.exists() {
        println!("skipped: {name} is absent");
        return None;
    }
    Some(path)
}

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-gemma4-mmproj-bf16.gguf")
}

fn picture(path: &Path) -> Picture {
    skep_vision::decode(&std::fs::read(path).unwrap(), &Limits::default()).unwrap()
}

fn array(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let data = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[data..].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn mean_difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / a.len() as f64
}

fn encoded(projector: &Projector, picture: &Picture) -> Vec<f32> {
    let mut out = Vec::new();
    let budget = Budget::new(70).unwrap();
    let scratch = &mut Scratch::new();
    projector.encode(&Threads(2), picture, budget, Precision::Exact, scratch, &mut out).unwrap();
    out
}

/// Embeddings of a small picture, not resized.
fn as_cut(projector: &Projector) -> Vec<f32> {
    let patches = Patches::new(&gradient(96, 48), 16).unwrap();
    let (tower, mut out) = (projector.tower().unwrap(), Vec::new());
    tower.encode(&Serial, &patches, Precision::Exact, &mut Scratch::new(), &mut out).unwrap();
    out
}

struct Oracle {
    picture: Picture,
    /// By transformers in f32, `[70, 256]`.
    expected: Vec<f32>,
}

fn oracle() -> Option<Oracle> {
    Some(Oracle {
        picture: picture(&shared("oracle/test-480x336.png")?),
        expected: array(&shared("oracle/gemma4-nano.hf.image_embd.npy")?),
    })
}

fn nano(kind: &str) -> Option<Projector> {
    let path = shared(&format!("oracle/mmproj-gemma4-nano-{kind}.gguf"))?;
    Some(Projector::load(&path, 256, Residence::Auto).unwrap())
}

#[test]
fn embeddings_are_those_of_transformers() {
    let (Some(oracle), Some(full), Some(half)) = (oracle(), nano("f32"), nano("f16")) else { return };
    assert_eq!(full.soft_tokens(&oracle.picture, Budget::new(70).unwrap()).unwrap(), 70);
    for (projector, bound) in [(full, 2e-5), (half, 1e-3)] {
        let difference = mean_difference(&encoded(&projector, &oracle.picture), &oracle.expected);
        println!("mean difference {difference:e}");
        assert!(difference < bound, "{difference:e}");
    }
}

/// The bound of the test above must tell each of these from the right thing.
#[test]
fn wrong_readings_are_far_from_transformers() {
    let (Some(oracle), Some(mut projector)) = (oracle(), nano("f32")) else { return };
    let far = |what: &str, embeddings: &[f32]| {
        let difference = mean_difference(embeddings, &oracle.expected);
        println!("{what}: mean difference {difference:e}");
        assert!(difference > 3e-3, "{what}: {difference:e}");
    };
    let picture = &oracle.picture;

    projector.config.activation = Activation::GeluQuick;
    far("quick gelu", &encoded(&projector, picture));
    projector.config.activation = Activation::GeluTanh;

    let half = projector.weights.positions.len() / 2;
    projector.weights.positions.rotate_left(half);
    far("tables of columns and rows swapped", &encoded(&projector, picture));
    projector.weights.positions.rotate_left(half);

    // A picture whose planar patches are the interleaved patches of the right one.
    let (width, patch) = (picture.width(), 16);
    let mut pixels = picture.rgb().to_vec();
    for y in 0..picture.height() {
        for x in 0..width {
            for channel in 0..3 {
                let at = channel * patch * patch + y % patch * patch + x % patch;
                let (from_x, from_y) = (x - x % patch + at / 3 % patch, y - y % patch + at / 3 / patch);
                pixels[(y * width + x) * 3 + channel] = picture.rgb()[(from_y * width + from_x) * 3 + at % 3];
            }
        }
    }
    let interleaved = Picture::new(width, picture.height(), pixels).unwrap();
    far("interleaved channels", &encoded(&projector, &interleaved));

    let right = mean_difference(&encoded(&projector, picture), &oracle.expected);
    assert!(right < 2e-5, "{right:e}");
}

#[test]
fn the_fast_tower_is_the_reference() {
    let projector = Projector::load(&bundled(), 256, Residence::Mapped).unwrap();
    let picture = gradient(192, 48);
    let tower = projector.tower().unwrap();
    let patches = Patches::new(&picture, 16).unwrap();
    let expected = skep_vision::reference::encode(&tower, &patches).unwrap();
    for precision in [Precision::Exact, Precision::Fast] {
        let mut out = Vec::new();
        tower.encode(&Threads(3), &patches, precision, &mut Scratch::new(), &mut out).unwrap();
        let difference = mean_difference(&out, &expected);
        assert!(difference < 2e-5, "{difference:e}");
    }
}

fn gradient(width: usize, height: usize) -> Picture {
    let pixel = |i: usize| [i % width * 255 / width, i / width * 255 / height, i * 7 % 256].map(|v| v as u8);
    Picture::new(width, height, (0..width * height).flat_map(pixel).collect()).unwrap()
}

/// One after the other, with other threads: the same bits.
#[test]
fn a_picture_is_encoded_alone() {
    let projector = Projector::load(&bundled(), 256, Residence::Copied).unwrap();
    let pictures = [gradient(300, 200), gradient(90, 400), gradient(33, 33)];
    let alone: Vec<Vec<f32>> = pictures.iter().map(|picture| encoded(&projector, picture)).collect();
    let scratch = &mut Scratch::new();
    let budget = Budget::new(70).unwrap();
    for order in [[0, 1, 2], [2, 1, 0], [1, 1, 0]] {
        for i in order {
            let mut out = vec![f32::NAN; 7];
            projector.encode(&Serial, &pictures[i], budget, Precision::Exact, scratch, &mut out).unwrap();
            assert_eq!(out.len(), 256 * projector.soft_tokens(&pictures[i], budget).unwrap());
            assert!(out == alone[i], "picture {i} differs in company");
        }
    }
}

/// A tensor on its way into another file: name, shape, type, bytes.
type Tensor = (String, Vec<u64>, TensorType, Vec<u8>);

/// A changed copy of the bundled projector, removed when dropped.
struct Edited(PathBuf);

impl Edited {
    fn new(name: &str, set: impl FnOnce(&mut Writer), change: impl FnOnce(&mut Vec<Tensor>)) -> Self {
        let file = skep_gguf::read(&bundled()).unwrap();
        let mut writer = Writer::new();
        set(&mut writer);
        for (key, value) in file.metadata() {
            // Keys set before stay.
            let _ = writer.set(key, value);
        }
        let mut tensors: Vec<Tensor> = file
            .tensors()
            .iter()
            .map(|t| (t.name().to_owned(), t.shape().to_vec(), t.ty(), file.data(t).to_vec()))
            .collect();
        change(&mut tensors);
        for (name, shape, ty, _) in &tensors {
            writer.tensor(name, shape, *ty).unwrap();
        }
        let path = std::env::temp_dir().join(format!("skep-projector-{}-{name}.gguf", std::process::id()));
        let mut data = tensors.iter();
        let out = std::fs::File::create(&path).unwrap();
        writer.write(out, |_, sink| sink.write_all(&data.next().unwrap().3)).unwrap();
        Self(path)
    }

    fn load(&self, hidden: usize) -> Result<Projector> {
        Projector::load(&self.0, hidden, Residence::Mapped)
    }

    /// The error of loading, without the path.
    fn error(&self) -> String {
        let error = self.load(256).err().expect("the file is refused");
        assert_eq!(error.kind(), ErrorKind::Model);
        error.to_string().replace(&format!("projector {}: ", self.0.display()), "")
    }
}

impl Drop for Edited {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn at<'t>(tensors: &'t mut [Tensor], name: &str) -> &'t mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
}

fn scalar(name: &str, value: f32) -> Tensor {
    (name.to_owned(), vec![1], TensorType::F32, value.to_le_bytes().to_vec())
}

#[test]
fn a_projection_stored_the_other_way_round_gives_the_same() {
    let projector = Projector::load(&bundled(), 256, Residence::Mapped).unwrap();
    let expected = as_cut(&projector);
    let turned = Edited::new(
        "turned",
        |_| (),
        |tensors| {
            let (_, shape, _, data) = at(tensors, "mm.input_projection.weight");
            assert_eq!(shape[..], [128, 256]);
            shape.reverse();
            let (old, new) = (data.clone(), data.as_chunks_mut::<2>().0);
            for (i, new) in new.iter_mut().enumerate() {
                let (input, output) = (i / 256, i % 256);
                new.copy_from_slice(&old[2 * (output * 128 + input)..][..2]);
            }
        },
    );
    assert!(as_cut(&turned.load(256).unwrap()) == expected);
}

#[test]
fn bounds_of_linear_layers_bind() {
    let plain = as_cut(&Projector::load(&bundled(), 256, Residence::Mapped).unwrap());
    let names =
        ["v.blk.0.attn_q", "v.blk.1.attn_v", "v.blk.2.ffn_up", "v.blk.3.ffn_down", "mm.input_projection"];
    for name in names {
        for side in ["input", "output"] {
            let bounded = |kind: &str, min: f32, max: f32| {
                let change = |tensors: &mut Vec<Tensor>| {
                    tensors.push(scalar(&format!("{name}.{side}_min"), min));
                    tensors.push(scalar(&format!("{name}.{side}_max"), max));
                };
                let edited = Edited::new(&format!("{kind}-{name}-{side}"), |_| (), change);
                edited.load(256).unwrap()
            };
            assert!(as_cut(&bounded("wide", -1e9, 1e9)) == plain, "{name} {side}");
            let tight = bounded("tight", -0.1, 0.05);
            let (embeddings, patches) = (as_cut(&tight), Patches::new(&gradient(96, 48), 16).unwrap());
            let expected = skep_vision::reference::encode(&tight.tower().unwrap(), &patches).unwrap();
            assert!(mean_difference(&embeddings, &expected) < 2e-5, "{name} {side}");
            assert!(mean_difference(&embeddings, &plain) > 1e-4, "{name} {side} does not bind");
        }
    }
    let empty = Edited::new(
        "empty",
        |_| (),
        |tensors| {
            tensors.push(scalar("v.blk.0.attn_q.input_min", 1.0));
            tensors.push(scalar("v.blk.0.attn_q.input_max", -1.0));
        },
    );
    assert_eq!(
        empty.error(),
        "tensor v.blk.0.attn_q.input_min is 1 and v.blk.0.attn_q.input_max -1: nothing lies between"
    );
}

#[test]
fn silu_only_where_the_file_says_so() {
    let plain = as_cut(&Projector::load(&bundled(), 256, Residence::Mapped).unwrap());
    let with = |name: &str, key: &'static str, value: bool| {
        let edited = Edited::new(name, |writer| drop(writer.set(key, value)), |_| ());
        as_cut(&edited.load(256).unwrap())
    };
    assert!(with("gelu", "clip.use_gelu", true) == plain);
    assert!(with("no-silu", "clip.use_silu", false) == plain);
    assert!(mean_difference(&with("silu", "clip.use_silu", true), &plain) > 1e-3);
}

#[test]
fn audio_is_set_aside_with_a_warning() {
    let edited = Edited::new(
        "audio",
        |_| (),
        |tensors| {
            tensors.push(scalar("a.blk.0.attn_q.weight", 1.0));
            tensors.push(scalar("mm.a.input_projection.weight", 1.0));
        },
    );
    let projector = edited.load(256).unwrap();
    assert_eq!(
        projector.warnings(),
        ["the projector's audio encoder (2 tensors) is set aside: audio is not supported"]
    );
}

#[test]
fn wrong_files_are_called_what_they_are() {
    let text = bundled().with_file_name("tiny-qwen35moe-Q4_K_M.gguf");
    let error = Projector::load(&text, 256, Residence::Mapped).err().unwrap().to_string();
    assert!(error.ends_with("the file is a model of architecture qwen35moe, not a projector"), "{error}");
    assert!(error.contains("tiny-qwen35moe-Q4_K_M.gguf"), "{error}");
    let error = Projector::load(&bundled(), 2816, Residence::Mapped).err().unwrap().to_string();
    assert!(
        error.ends_with("it projects to 256, the model's embedding is 2816: the wrong mmproj for this model"),
        "{error}"
    );
    let error =
        Projector::load(&bundled().with_file_name("absent.gguf"), 256, Residence::Mapped).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::File);

    let missing = Edited::new(
        "missing",
        |_| (),
        |tensors| {
            tensors.retain(|tensor| tensor.0 != "v.blk.2.ln2.weight");
        },
    );
    assert_eq!(missing.error(), "missing tensors: v.blk.2.ln2.weight");
    let renamed = Edited::new(
        "renamed",
        |_| (),
        |tensors| {
            at(tensors, "v.blk.1.attn_q.weight").0 = "v.blk.1.attn_qx.weight".to_owned();
        },
    );
    assert_eq!(renamed.error(), "missing tensors: v.blk.1.attn_q.weight");
    let extra = Edited::new("extra", |_| (), |tensors| tensors.push(scalar("v.blk.0.attn_q.bias", 1.0)));
    assert_eq!(extra.error(), "tensors without a role in this architecture: v.blk.0.attn_q.bias");
    let half = Edited::new("half", |_| (), |tensors| tensors.retain(|tensor| tensor.0 != "v.std_scale"));
    assert_eq!(half.error(), "missing tensors: v.std_scale");
    let kind = Edited::new("kind", |writer| drop(writer.set("clip.vision.projector_type", "gemma3")), |_| ());
    assert_eq!(kind.error(), "projector type gemma3 is not supported (supported: gemma4v)");
    let mean = Edited::new(
        "mean",
        |writer| drop(writer.set("clip.vision.image_mean", &[0.5_f32, 0.5, 0.5][..])),
        |_| (),
    );
    assert_eq!(mean.error(), "clip.vision.image_mean is not 0, as gemma4v has it");
    let heads =
        Edited::new("heads", |writer| drop(writer.set("clip.vision.attention.head_count", 3_u32)), |_| ());
    assert!(heads.load(256).is_err());
}

#[test]
fn a_picture_too_long_for_the_tables_is_refused() {
    let edited = Edited::new(
        "short",
        |_| (),
        |tensors| {
            let (_, shape, _, data) = at(tensors, "v.position_embd.weight");
            shape[1] = 4;
            data.truncate(128 * 4 * 2 * 4);
        },
    );
    let projector = edited.load(256).unwrap();
    let mut out = Vec::new();
    let budget = Budget::new(70).unwrap();
    let error = projector
        .encode(&Serial, &gradient(96, 96), budget, Precision::Exact, &mut Scratch::new(), &mut out)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Request);
    assert!(error.to_string().ends_with("patches: the tower has 4 positions a side"), "{error}");
    let early = projector.soft_tokens(&gradient(96, 96), budget).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Request);
    assert!(early.to_string().ends_with("the tower has 4 positions"), "{early}");
}
