//! NumPy's `.npy` format, version 1.0, as far as two-dimensional little-endian f32 goes.

use std::io::{self, Write};

/// Writes rows of `cols` numbers each as an array `[rows, cols]`.
pub(crate) fn write(out: &mut dyn Write, cols: usize, values: &[f32]) -> io::Result<()> {
    let rows = values.len().checked_div(cols).unwrap_or(0);
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
    // Magic, version and header length take ten bytes; the data must begin at a multiple of 64.
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    out.write_all(b"\x93NUMPY\x01\x00")?;
    out.write_all(&(header.len() as u16).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for value in values {
        out.write_all(&value.to_le_bytes())?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_header_is_aligned_and_gives_the_shape() {
        let mut bytes = Vec::new();
        super::write(&mut bytes, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let data = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        assert_eq!(data % 64, 0);
        assert!(String::from_utf8_lossy(&bytes[10..data]).contains("'shape': (2, 3)"));
        assert_eq!(bytes[data..data + 8], [0, 0, 128, 63, 0, 0, 0, 64]);
        assert_eq!(bytes.len(), data + 24);
    }
}
