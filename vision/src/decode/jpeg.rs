/// Whether a JPEG file reaches its end marker.
///
/// Of a file cut short the decoder makes a picture whose rest is grey, so that this has to be known beforehand. Markers
/// (ITU T.81, B.1.1) are walked; in entropy-coded data only the bytes of a marker follow 0xFF, except 0 and restarts.
pub(super) fn check(bytes: &[u8]) -> Result<(), &'static str> {
    const CUT: &str = "it is cut short";
    const START_OF_SCAN: u8 = 0xDA;
    // After the start marker, whose presence told the format.
    let mut rest = bytes.get(2..).ok_or(CUT)?;
    loop {
        // Filling bytes and what a sloppy writer leaves between segments.
        let at =
            rest.windows(2).position(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF)).ok_or(CUT)?;
        let marker = rest[at + 1];
        rest = &rest[at + 2..];
        match marker {
            0xD9 => return Ok(()),
            // Restart and stand-alone markers have no length. Those inside a scan pass here too.
            0x01 | 0xD0..=0xD8 => {}
            _ => {
                let length = rest.first_chunk().map(|length| u16::from_be_bytes(*length)).ok_or(CUT)?;
                if length < 2 {
                    return Err("a segment is shorter than its own length");
                }
                rest = rest.get(usize::from(length)..).ok_or(CUT)?;
                if marker == START_OF_SCAN && rest.is_empty() {
                    return Err(CUT);
                }
            }
        }
    }
}
