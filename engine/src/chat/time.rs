//! Dates for templates.

/// Formats a time, in seconds since 1970 and in UTC, by the directives of C's and Python's `strftime`, in English.
///
/// Unknown directives stay as they are.
pub(super) fn strftime(format: &str, seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = (days + 4).rem_euclid(7);
    let year_day = days - day_number(year, 1, 1) + 1;
    let name = |names: &[&'static str], at: i64| names[at as usize];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        // GNU's flag for numbers without padding.
        let (bare, directive) = match rest.strip_prefix('-') {
            Some(after) => (true, after.chars().next()),
            None => (false, rest.chars().next()),
        };
        let number = |value: i64, width: usize| match bare {
            true => value.to_string(),
            false => format!("{value:0width$}"),
        };
        let text = match directive {
            Some('a') => name(&WEEKDAYS, weekday)[..3].to_owned(),
            Some('A') => name(&WEEKDAYS, weekday).to_owned(),
            Some('b' | 'h') => name(&MONTHS, month - 1)[..3].to_owned(),
            Some('B') => name(&MONTHS, month - 1).to_owned(),
            Some('d') => number(day, 2),
            Some('D') => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
            Some('e') => format!("{day:2}"),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('j') => number(year_day, 3),
            Some('m') => number(month, 2),
            Some('M') => number(minute, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('R') => format!("{hour:02}:{minute:02}"),
            Some('S') => number(second, 2),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('y') => number(year.rem_euclid(100), 2),
            Some('Y') => year.to_string(),
            Some('z') => "+0000".to_owned(),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            _ => {
                out.push('%');
                continue;
            }
        };
        out.push_str(&text);
        rest = &rest[usize::from(bare) + 1..];
    }
    out.push_str(rest);
    out
}

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Days from 1970-01-01 to a date of the Gregorian calendar. Years begin in March here, so that the leap day is last.
fn day_number(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Inverse of [`day_number`].
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12 + 1;
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_round_trip() {
        for days in (-800_000..800_000).step_by(17) {
            let (year, month, day) = date(days);
            assert_eq!(day_number(year, month, day), days);
            assert!((1..=12).contains(&month) && (1..=31).contains(&day));
        }
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(19_782), (2024, 2, 29));
    }

    #[test]
    fn formats_as_python() {
        // datetime.fromtimestamp(1709215445, timezone.utc).strftime(...)
        for (format, text) in [
            ("%d %b %Y", "29 Feb 2024"),
            ("%A, %B %-d, %Y", "Thursday, February 29, 2024"),
            ("%Y-%m-%d %H:%M:%S", "2024-02-29 14:04:05"),
            ("%I:%M %p %-I", "02:04 PM 2"),
            ("%j %y %e %a 100%%", "060 24 29 Thu 100%"),
            ("%F %T", "2024-02-29 14:04:05"),
            ("%", "%"),
            ("é%Qé%-", "é%Qé%-"),
        ] {
            assert_eq!(strftime(format, 1_709_215_445), text, "{format}");
        }
        assert_eq!(strftime("%F %T %a", -1), "1969-12-31 23:59:59 Wed");
    }
}
