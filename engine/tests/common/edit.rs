//! Changed copies of the bundled model, to show what a wrong file or a wrong reading of it does.

use skep_gguf::{Gguf, TensorInfo, TensorType, Writer};
use std::fs::File;
use std::path::{Path, PathBuf};

/// A tensor as it is to be written.
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) ty: TensorType,
    pub(crate) data: Vec<u8>,
}

impl Tensor {
    fn of(file: &Gguf<Vec<u8>>, info: &TensorInfo) -> Self {
        let (name, shape) = (info.name().to_owned(), info.shape().to_vec());
        Self { name, shape, ty: info.ty(), data: file.data(info).to_vec() }
    }

    /// The numbers of an F32 tensor.
    pub(crate) fn floats(&mut self) -> &mut [[u8; 4]] {
        assert_eq!(self.ty.name(), "F32");
        self.data.as_chunks_mut::<4>().0
    }

    /// A tensor of F32 numbers.
    pub(crate) fn new(name: &str, values: &[f32]) -> Self {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name: name.to_owned(), shape: vec![values.len() as u64], ty: TensorType::F32, data }
    }
}

/// A changed file, removed when dropped.
pub(crate) struct Edited(PathBuf);

impl Edited {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Edited {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes a copy of the bundled model in which `keys` are set, `without` left out, and `tensors` changed.
pub(crate) fn edited(
    name: &str,
    without: &[&str],
    set: impl FnOnce(&mut Writer),
    tensors: impl FnOnce(&mut Vec<Tensor>),
) -> Edited {
    let file = skep_gguf::read(&super::models().join("tiny-qwen35moe-Q4_K_M.gguf")).unwrap();
    let mut writer = Writer::new();
    set(&mut writer);
    for (key, value) in file.metadata() {
        if !without.contains(&key) {
            writer.set(key, value).unwrap();
        }
    }
    let mut list: Vec<Tensor> = file.tensors().iter().map(|info| Tensor::of(&file, info)).collect();
    tensors(&mut list);
    for tensor in &list {
        writer.tensor(&tensor.name, &tensor.shape, tensor.ty).unwrap();
    }
    let path = std::env::temp_dir().join(format!("skep-{}-{name}.gguf", std::process::id()));
    let mut tensors = list.iter();
    let out = File::create(&path).unwrap();
    writer.write(out, |_, sink| sink.write_all(&tensors.next().unwrap().data)).unwrap();
    Edited(path)
}
