use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use skep_engine::ErrorKind;

/// An error as the OpenAI API words it: a status and `{"error": {"message", "type", "param", "code"}}`.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
    header: Option<(&'static str, &'static str)>,
}

#[derive(Debug, Serialize)]
pub(super) struct ErrorBody {
    error: Detail,
}

#[derive(Debug, Serialize)]
struct Detail {
    message: String,
    r#type: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let r#type = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let error = Detail { message: message.into(), r#type, param: None, code };
        Self { status, body: ErrorBody { error }, header: None }
    }

    /// A request that is not valid (400), without a single field to blame.
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, None, message)
    }

    /// A field that is not valid (400).
    pub(super) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(message).with_param(param)
    }

    /// A field that asks for what this server cannot do (400): never accepted and ignored.
    pub(super) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), message).with_param(param)
    }

    pub(super) fn unauthorized() -> Self {
        let message = "missing or wrong API key: send the header `Authorization: Bearer KEY`";
        let error = Self::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message);
        error.with_header("www-authenticate", "Bearer")
    }

    pub(super) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, None, message)
    }

    pub(super) fn not_found(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, None, format!("no such endpoint: {path}"))
    }

    pub(super) fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("method {method} is not allowed for {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, None, message)
    }

    pub(super) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("the model `{asked}` is not served here; `{served}` is");
        Self::new(StatusCode::NOT_FOUND, Some("model_not_found"), message).with_param("model")
    }

    pub(super) fn body_timeout() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, None, "the request body did not arrive in time")
    }

    pub(super) fn too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, None, message)
    }

    /// Bodies and pictures of other requests take all the memory that is set aside for them (503).
    pub(super) fn no_room() -> Self {
        let message = "too many large requests are being read: try again later";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("busy"), message);
        error.with_header("retry-after", "1")
    }

    pub(super) fn loading(loaded: f64) -> Self {
        let percent = (loaded * 100.0).floor();
        let message = format!("the model is being loaded ({percent} %)");
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("loading"), message);
        error.with_header("retry-after", "2")
    }

    pub(super) fn shutting_down() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("cancelled"), "the server is shutting down")
    }

    pub(super) fn slow_reader() -> Self {
        let message = "the answer was cut off because the client reads it too slowly";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, Some("slow_reader"), message)
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
    }

    pub(super) fn with_param(mut self, param: impl Into<String>) -> Self {
        self.body.error.param = Some(param.into());
        self
    }

    fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.header = Some((name, value));
        self
    }

    /// The body, for the middle of a stream, where no status can be sent any more.
    pub(super) fn into_body(self) -> ErrorBody {
        self.body
    }

    /// The line for the log, if this is the server's fault. Errors of clients may quote their text and stay out.
    pub(super) fn fault(&self) -> Option<&str> {
        (self.status == StatusCode::INTERNAL_SERVER_ERROR).then_some(&self.body.error.message)
    }
}

impl From<skep_engine::Error> for ApiError {
    fn from(error: skep_engine::Error) -> Self {
        let message = error.to_string();
        match error.kind() {
            ErrorKind::Request | ErrorKind::Template => Self::invalid(message),
            ErrorKind::ContextLength { .. } => {
                Self::new(StatusCode::BAD_REQUEST, Some("context_length_exceeded"), message)
            }
            ErrorKind::Busy => Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("busy"), message)
                .with_header("retry-after", "1"),
            ErrorKind::Cancelled => Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("cancelled"), message),
            _ => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        if let Some((name, value)) = self.header {
            response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        response
    }
}
