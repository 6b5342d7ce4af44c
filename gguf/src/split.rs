use alloc::vec::Vec;

use crate::error::{Error, ErrorKind, Result};
use crate::gguf::Part;

/// Number of the part, from 0.
pub(crate) const NUMBER: &str = "split.no";
/// Number of parts in the set; 0 or 1 in a file that is not split.
pub(crate) const COUNT: &str = "split.count";
/// Number of tensors in all parts.
pub(crate) const TENSORS: &str = "split.tensors.count";

/// Checks that the numbers and counts of the parts make one whole set, and puts the parts in order.
pub(crate) fn order<B: AsRef<[u8]>>(parts: &mut Vec<Part<B>>) -> Result<()> {
    let Some(first) = parts.first() else { return Err(ErrorKind::NoParts.into()) };
    let count = first.integer(COUNT)?.unwrap_or(0);
    if parts.len() == 1 && count <= 1 {
        return Ok(());
    }
    let mut numbered = Vec::with_capacity(parts.len());
    for part in parts.drain(..) {
        let number = number(&part, count, numbered.first().map(|(_, first)| first))?;
        numbered.push((number, part));
    }
    numbered.sort_by_key(|&(number, _)| number);
    for pair in numbered.windows(2) {
        let ((number, first), (other, second)) = (&pair[0], &pair[1]);
        if number == other {
            let kind = ErrorKind::DuplicatePart { number: u64::from(*number) + 1, other: first.name() };
            return Err(second.blame(kind));
        }
    }
    if numbered.len() < usize::from(count) {
        return Err(numbered[0].1.blame(missing(count, numbered.iter().map(|&(number, _)| number))));
    }
    parts.extend(numbered.into_iter().map(|(_, part)| part));
    tensor_total(parts)
}

/// The number of a part, from 0, below `count`.
fn number<B: AsRef<[u8]>>(part: &Part<B>, count: u16, first: Option<&Part<B>>) -> Result<u16> {
    let own_count = part.integer::<u16>(COUNT)?.unwrap_or(0);
    if own_count == 0 {
        return Err(part.blame(ErrorKind::NotSplit { key: COUNT }));
    }
    if own_count != count {
        let other = first.map(Part::name).unwrap_or_default();
        return Err(part.blame(ErrorKind::MixedParts { key: COUNT.into(), other }));
    }
    let number =
        part.integer::<u16>(NUMBER)?.ok_or_else(|| part.blame(ErrorKind::NotSplit { key: NUMBER }))?;
    if number >= count {
        let kind = ErrorKind::PartNumber { number: number.into(), count: count.into() };
        return Err(part.blame(Error::from(kind).in_key(NUMBER)));
    }
    Ok(number)
}

/// Names the parts that are not there; the numbers are from 0 and ascend.
fn missing(count: u16, there: impl Iterator<Item = u16>) -> ErrorKind {
    let mut there = there.peekable();
    let missing = (0..count).filter(|number| there.next_if_eq(number).is_none());
    let missing = missing.map(|number| u64::from(number) + 1).collect();
    ErrorKind::MissingParts { count: count.into(), missing }
}

fn tensor_total<B: AsRef<[u8]>>(parts: &[Part<B>]) -> Result<()> {
    let first = &parts[0];
    let declared =
        first.integer::<u64>(TENSORS)?.ok_or_else(|| first.blame(ErrorKind::NotSplit { key: TENSORS }))?;
    let found = parts.iter().map(|part| part.header.tensors.len() as u64).sum();
    if declared != found {
        return Err(first.blame(Error::from(ErrorKind::TensorTotal { declared, found }).in_key(TENSORS)));
    }
    Ok(())
}
