use crate::error::{Error, ErrorKind, Result};

/// Reads a header front to back; every step is checked against the end of the bytes.
#[derive(Clone)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(crate) fn position(&self) -> usize {
        self.position
    }

    pub(crate) fn left(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    /// The bytes from `start` to here.
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.position]
    }

    pub(crate) fn take(&mut self, length: u64, what: &'static str) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.position..];
        let taken = usize::try_from(length).ok().and_then(|length| rest.get(..length)).ok_or_else(|| {
            Error::from(ErrorKind::Truncated { what, needed: length, available: rest.len() as u64 })
                .at(self.position as u64)
        })?;
        self.position += taken.len();
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A length and as many bytes.
    pub(crate) fn string(&mut self, what: &'static str) -> Result<&'a [u8]> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A count of things that take at least `least` bytes each, which must therefore fit the rest.
    pub(crate) fn bounded(&self, count: u64, least: u64, what: &'static str) -> Result<usize> {
        let max = self.left() / least;
        match usize::try_from(count) {
            Ok(fits) if count <= max => Ok(fits),
            _ => Err(ErrorKind::Count { what, count, max }.into()),
        }
    }
}
