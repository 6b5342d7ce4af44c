//! The tensors of a model: claimed by role, kept in their GGUF blocks, read where they lie.

use crate::error::{Error, ErrorKind, Result};
use skep_gguf::{Gguf, Map, TensorInfo};
use skep_hal::Buffer;
use skep_moe_cache::cpu::Bank;
use skep_quant::{Matrix, Type};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// A tensor that has a role in the model, as a stack of matrices of one type.
///
/// Rows are outputs: a stack of `count` matrices `[rows, cols]`, one after the other; a dense weight is a stack of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weight {
    tensor: usize,
    pub(crate) ty: Type,
    pub(crate) count: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// First row of this weight inside its tensor, for fused dense tensors.
    first_row: usize,
}

impl Weight {
    /// Stands for a tensor that the file lacks; `Claims::finish` reports it before it can be used.
    const MISSING: Self =
        Self { tensor: usize::MAX, ty: Type::F32, count: 0, rows: 0, cols: 0, first_row: 0 };

    /// The rows `range` of a fused dense weight, as a weight of its own.
    pub(crate) fn rows(&self, range: Range<usize>) -> Self {
        debug_assert!(self.count == 0 || self.count == 1 && range.end <= self.rows);
        Self { first_row: self.first_row + range.start, rows: range.len(), ..*self }
    }

    /// Bytes of all matrices of the stack.
    pub(crate) fn bytes(&self) -> u64 {
        (self.count * self.rows) as u64 * self.row_bytes() as u64
    }

    fn row_bytes(&self) -> usize {
        self.ty.row_bytes(self.cols).unwrap_or(0)
    }
}

/// The tensor table of a file while roles are given out: every tensor is claimed once, or the load fails.
pub(crate) struct Claims<'f, B> {
    file: &'f Gguf<B>,
    claimed: Vec<bool>,
    used: Vec<bool>,
    missing: Vec<String>,
}

impl<'f, B: AsRef<[u8]>> Claims<'f, B> {
    pub(crate) fn new(file: &'f Gguf<B>) -> Self {
        let n = file.tensors().len();
        Self { file, claimed: vec![false; n], used: vec![false; n], missing: Vec::new() }
    }

    /// Whether the file has this tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    /// Claims a stack of `count` matrices `[rows, cols]`.
    pub(crate) fn stack(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Weight> {
        let Some((index, info)) = self.find(name) else {
            self.missing.push(name.to_owned());
            return Ok(Weight::MISSING);
        };
        let mut want: Vec<u64> = [cols, rows, count].iter().map(|&d| d as u64).collect();
        let mut found = info.shape().to_vec();
        for shape in [&mut want, &mut found] {
            while shape.len() > 1 && shape.last() == Some(&1) {
                shape.pop();
            }
        }
        if want != found {
            return Err(Error::model(format_args!(
                "tensor {name} has shape {:?}, but the metadata ask for {want:?}",
                info.shape()
            )));
        }
        let ty = supported_type(info)?;
        self.claim(index, name)?;
        self.used[index] = true;
        Ok(Weight { tensor: index, ty, count, rows, cols, first_row: 0 })
    }

    /// Claims a matrix `[rows, cols]`.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight> {
        self.stack(name, 1, rows, cols)
    }

    /// Claims a tensor of any rank as the matrix `[rows, cols]` of its outermost dimension: the weight of a convolution
    /// whose windows do not overlap.
    pub(crate) fn convolution(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight> {
        let Some((index, info)) = self.find(name) else {
            self.missing.push(name.to_owned());
            return Ok(Weight::MISSING);
        };
        let fits =
            info.shape().last() == Some(&(rows as u64)) && info.n_elements() == rows as u64 * cols as u64;
        if !fits {
            return Err(Error::model(format_args!(
                "tensor {name} has shape {:?}, but the metadata ask for {rows} windows of {cols} numbers",
                info.shape()
            )));
        }
        let ty = supported_type(info)?;
        if ty.is_quantised() {
            return Err(Error::model(format_args!(
                "tensor {name} is of type {ty}: a convolution must hold floats"
            )));
        }
        self.claim(index, name)?;
        self.used[index] = true;
        Ok(Weight { tensor: index, ty, count: 1, rows, cols, first_row: 0 })
    }

    /// Claims a small tensor of `len` numbers and decodes it.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let Some((index, info)) = self.find(name) else {
            self.missing.push(name.to_owned());
            return Ok(Vec::new());
        };
        if info.n_elements() != len as u64 {
            return Err(Error::model(format_args!(
                "tensor {name} has shape {:?}, but the metadata ask for {len} numbers",
                info.shape()
            )));
        }
        let ty = supported_type(info)?;
        self.claim(index, name)?;
        let mut out = vec![0.0; len];
        skep_quant::decode(ty, self.file.data(info), &mut out)
            .map_err(|error| Error::model(format_args!("tensor {name}: {error}")))?;
        Ok(out)
    }

    /// Claims a tensor that is recognised but not used by this build of the model.
    pub(crate) fn set_aside(&mut self, name: &str) -> Result<u64> {
        match self.find(name) {
            Some((index, info)) => {
                self.claim(index, name)?;
                Ok(info.n_bytes())
            }
            None => {
                self.missing.push(name.to_owned());
                Ok(0)
            }
        }
    }

    /// Ends the claiming: an error that names every tensor without a role and every role without a tensor.
    pub(crate) fn finish(self) -> Result<Vec<bool>> {
        if !self.missing.is_empty() {
            return Err(Error::model(format_args!("missing tensors: {}", self.missing.join(", "))));
        }
        let strangers: Vec<&str> = self
            .file
            .tensors()
            .iter()
            .zip(&self.claimed)
            .filter(|(_, claimed)| !**claimed)
            .map(|(info, _)| info.name())
            .collect();
        if !strangers.is_empty() {
            return Err(Error::model(format_args!(
                "tensors without a role in this architecture: {}",
                strangers.join(", ")
            )));
        }
        Ok(self.used)
    }

    fn find(&self, name: &str) -> Option<(usize, &'f TensorInfo)> {
        let info = self.file.tensor(name)?;
        let index = self.file.tensors().iter().position(|other| std::ptr::eq(other, info))?;
        Some((index, info))
    }

    fn claim(&mut self, index: usize, name: &str) -> Result<()> {
        if std::mem::replace(&mut self.claimed[index], true) {
            return Err(Error::model(format_args!("tensor {name} has two roles")));
        }
        Ok(())
    }
}

/// The type of a tensor, if there are kernels for it.
fn supported_type(info: &TensorInfo) -> Result<Type> {
    Type::from_id(info.ty().id()).map_err(|_| {
        let (name, ty) = (info.name(), info.ty().name());
        Error::model(format_args!("tensor {name} is of type {ty}, which is not supported"))
    })
}

/// How the weights are kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Residence {
    /// In huge pages of the process when they fit the available memory, otherwise mapped.
    Auto,
    /// Copied once into anonymous memory that asks for huge pages: fewer address-translation misses.
    Copied,
    /// Read where the file is mapped: no copy, pages shared between processes and given back under pressure.
    Mapped,
}

/// One file of a model: mapped, and open for reading.
pub(crate) struct Part {
    map: Map,
    file: File,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        self.map.as_ref()
    }
}

/// Opens a model file, or all parts of a split one.
pub(crate) fn open(path: &Path) -> Result<Gguf<Part>> {
    let part = |path: &Path| Ok(Part { map: Map::open(path)?, file: File::open(path)? });
    Ok(skep_gguf::open_with(path, part)?)
}

/// Bytes of the tensors marked in `used`.
pub(crate) fn bytes(file: &Gguf<Part>, used: &[bool]) -> u64 {
    file.tensors().iter().zip(used).filter(|(_, used)| **used).map(|(info, _)| info.n_bytes()).sum()
}

/// The bytes of the claimed tensors.
pub(crate) struct Store {
    file: Gguf<Part>,
    copied: Option<Copied>,
}

/// Tensors in memory of the process, and where each lies.
struct Copied {
    bytes: Buffer<u8>,
    spans: Vec<Range<usize>>,
}

impl Store {
    /// Keeps the tensors marked in `used`, telling `progress` the bytes done and those in all.
    pub(crate) fn new(
        file: Gguf<Part>,
        used: &[bool],
        residence: Residence,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        const LINE: usize = 64;
        let mut spans = Vec::with_capacity(used.len());
        let mut total = 0_usize;
        for (info, used) in file.tensors().iter().zip(used) {
            let len = if *used { info.n_bytes() as usize } else { 0 };
            spans.push(total..total + len);
            total = (total + len).next_multiple_of(LINE);
        }
        let copy = match residence {
            Residence::Copied => true,
            Residence::Mapped => false,
            Residence::Auto => {
                let available = skep_hal::memory::Memory::detect().available;
                available.is_some_and(|available| total as u64 <= available / 10 * 9)
            }
        };
        let copied = if copy { Some(Copied::read(&file, spans, total, progress)?) } else { None };
        Ok(Self { file, copied })
    }

    /// Bytes of the tensors marked in `used`.
    pub(crate) fn bytes_of(&self, used: &[bool]) -> u64 {
        bytes(&self.file, used)
    }

    /// A dense weight.
    pub(crate) fn matrix(&self, weight: &Weight) -> Matrix<'_> {
        let row = weight.row_bytes();
        let start = weight.first_row * row;
        let bytes = &self.bytes(weight.tensor)[start..start + weight.rows * row];
        Matrix::new(weight.ty, weight.rows, weight.cols, bytes)
            .expect("shapes were checked when the tensor was claimed")
    }

    /// All bytes of a weight or stack.
    pub(crate) fn weight_bytes(&self, weight: &Weight) -> &[u8] {
        let start = weight.first_row * weight.row_bytes();
        &self.bytes(weight.tensor)[start..start + weight.bytes() as usize]
    }

    /// Gives back the memory of a weight that has been copied elsewhere; the file still has it.
    pub(crate) fn release(&self, weight: &Weight) {
        let info = &self.file.tensors()[weight.tensor];
        if let (None, Some(part)) = (&self.copied, self.file.part(info.part())) {
            let start = info.offset() as usize + weight.first_row * weight.row_bytes();
            // What the system does not take back costs memory, and nothing else.
            let _ = part.map.release(start, weight.bytes() as usize);
        }
    }

    /// A stack of experts.
    pub(crate) fn bank(&self, weight: &Weight) -> Result<Bank<'_>> {
        Bank::new(weight.ty, weight.count, weight.rows, weight.cols, self.bytes(weight.tensor))
            .map_err(Error::model)
    }

    fn bytes(&self, tensor: usize) -> &[u8] {
        match &self.copied {
            Some(copied) => &copied.bytes[copied.spans[tensor].clone()],
            None => self.file.data(&self.file.tensors()[tensor]),
        }
    }
}

impl Copied {
    /// Reads rather than copies from the map, so that the pages of the file never count as ours.
    fn read(
        file: &Gguf<Part>,
        spans: Vec<Range<usize>>,
        total: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        const PIECE: usize = 16 << 20;
        let mut bytes = Buffer::<u8>::zeroed(total)?;
        let mut done = 0;
        for (info, span) in file.tensors().iter().zip(&spans).filter(|(_, span)| !span.is_empty()) {
            let failed = |error: &dyn std::fmt::Display| {
                Error::new(ErrorKind::File, format!("tensor {} cannot be read: {error}", info.name()))
            };
            let part = file.part(info.part()).ok_or_else(|| failed(&"its file is not open"))?;
            let mut source = &part.file;
            source.seek(SeekFrom::Start(info.offset())).map_err(|error| failed(&error))?;
            for piece in bytes[span.clone()].chunks_mut(PIECE) {
                source.read_exact(piece).map_err(|error| failed(&error))?;
                done += piece.len() as u64;
                progress(done, total as u64);
            }
        }
        Ok(Self { bytes, spans })
    }
}
