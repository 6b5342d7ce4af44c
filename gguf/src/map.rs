#![allow(unsafe_code)] // mapping a file is the one unsafe operation of this crate

use core::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

use crate::error::Result;
use crate::files::open_with;
use crate::gguf::Gguf;

/// Maps a file, or all parts of a split one, into memory and parses it.
///
/// `path` may be a file, any part of a split file (named `NAME-0000i-of-0000N.gguf`, all in one folder), or a folder
/// that holds one such file or set and no other. Only the header is read; tensor data is read by the operating system
/// when it is first touched.
///
/// The files must not be changed or truncated while they are open: see [`Map`].
///
/// # Errors
/// A file is missing, unreadable or malformed, or the parts do not belong together; the error names the file.
///
/// ```no_run
/// let model = skep_gguf::open("model-00001-of-00003.gguf".as_ref())?;
/// println!("{} tensors in {} files", model.tensors().len(), model.parts());
/// # Ok::<(), skep_gguf::Error>(())
/// ```
pub fn open(path: &Path) -> Result<Gguf<Map>> {
    open_with(path, Map::open)
}

/// A file mapped into memory, read-only.
///
/// # Contract
/// While the map lives nobody may write to the file or truncate it. Rust cannot check that: it is the one promise
/// that the user of a map makes. Replacing a file by renaming another over it is fine, since the map keeps the old one.
/// If the promise is broken, reading past the new end stops the process (`SIGBUS`), and changed weights are wrong
/// weights. Where files may change, use [`read`](crate::read), which copies them into memory first.
pub struct Map(Mmap);

impl Map {
    /// Maps a file.
    ///
    /// # Errors
    /// It cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read-only, and that the file stays as it is while the map lives is the documented contract
        // of this type, as of every reader of mapped files.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self(map))
    }

    /// Tells the operating system how the bytes will be used. It may refuse or ignore the advice: nothing but speed
    /// depends on it.
    ///
    /// # Errors
    /// The system does not know the advice or cannot follow it.
    pub fn advise(&self, advice: Advice) -> io::Result<()> {
        self.advise_range(advice, 0, self.0.len())
    }

    /// As [`advise`](Self::advise), for `len` bytes from `offset`.
    ///
    /// # Errors
    /// The system does not know the advice or cannot follow it, or the range is not inside the file.
    pub fn advise_range(&self, advice: Advice, offset: usize, len: usize) -> io::Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.0.len()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the range is not inside the file"));
        }
        #[cfg(unix)]
        if let Some(advice) = advice.native() {
            return self.0.advise_range(advice, offset, len);
        }
        Err(io::Error::new(io::ErrorKind::Unsupported, "no such advice on this system"))
    }
}

impl Map {
    /// Gives the memory of `len` bytes from `offset` back to the operating system, which reads them from the file again when
    /// they are touched. Pages that lie only partly in the range stay. The system may refuse; nothing but memory depends on
    /// it.
    ///
    /// # Errors
    /// The system cannot follow, or the range is not inside the file.
    pub fn release(&self, offset: usize, len: usize) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|&end| end <= self.0.len());
        let end = end
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the range is not inside the file"))?;
        // Larger than the pages of any system here; what lies at the rims is little.
        const PAGE: usize = 64 << 10;
        let (start, end) = (offset.next_multiple_of(PAGE), end / PAGE * PAGE);
        if start >= end {
            return Ok(());
        }
        // SAFETY: pages of a read-only map of a file hold nothing that is not in the file.
        #[cfg(unix)]
        return unsafe {
            self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
        };
        #[cfg(not(unix))]
        Ok(())
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Map({} bytes)", self.0.len())
    }
}

impl Gguf<Map> {
    /// Gives the same advice on all files.
    ///
    /// # Errors
    /// As [`Map::advise`]; the remaining files are not advised on.
    pub fn advise(&self, advice: Advice) -> io::Result<()> {
        (0..self.parts()).filter_map(|i| self.part(i)).try_for_each(|map| map.advise(advice))
    }
}

/// How mapped bytes will be used (`madvise`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Use huge pages where the file system can (Linux).
    HugePage,
    /// No particular order.
    Normal,
    /// Read everything now, and return when it is there (Linux 5.14).
    Populate,
    /// In no order: do not read ahead.
    Random,
    /// Front to back: read ahead more.
    Sequential,
    /// Soon: start to read now.
    WillNeed,
}

#[cfg(unix)]
impl Advice {
    fn native(self) -> Option<memmap2::Advice> {
        Some(match self {
            #[cfg(target_os = "linux")]
            Self::HugePage => memmap2::Advice::HugePage,
            Self::Normal => memmap2::Advice::Normal,
            #[cfg(target_os = "linux")]
            Self::Populate => memmap2::Advice::PopulateRead,
            Self::Random => memmap2::Advice::Random,
            Self::Sequential => memmap2::Advice::Sequential,
            Self::WillNeed => memmap2::Advice::WillNeed,
            #[cfg(not(target_os = "linux"))]
            Self::HugePage | Self::Populate => return None,
        })
    }
}
