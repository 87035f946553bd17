//! Reading the Prometheus text format.

/// The samples of one scrape.
pub struct Samples(String);

impl Samples {
    /// Of the text of `/metrics`.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The sum of the samples of a metric that carry all these labels; 0 when there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let lines = self.0.lines().filter(|line| !line.starts_with('#'));
        let samples = lines.filter_map(|line| line.rsplit_once(' '));
        let fits = samples.filter(|(series, _)| {
            let (metric, set) = series.split_once('{').unwrap_or((series, ""));
            metric == name && wanted.iter().all(|label| set.contains(label.as_str()))
        });
        fits.map(|(_, value)| value.parse::<f64>().unwrap()).sum()
    }
}
