use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

use super::error::ApiError;
use super::model::Card;
use super::server::App;

#[derive(Debug, Serialize)]
pub(super) struct ModelObject {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Tokens of prompt and answer together; not part of OpenAI's object, but what agents need to compact in time.
    context_length: usize,
    /// Not part of OpenAI's object either, but how other servers tell what a model takes.
    input_modalities: &'static [&'static str],
}

#[derive(Debug, Serialize)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

impl ModelObject {
    fn new(card: Card, created: u64) -> Self {
        let input_modalities: &[&str] = if card.images.is_some() { &["text", "image"] } else { &["text"] };
        let context_length = card.context;
        Self { id: card.id, object: "model", created, owned_by: "skep", context_length, input_modalities }
    }
}

/// `GET /v1/models`.
pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    let card = app.model.backend()?.card();
    Ok(Json(ModelList { object: "list", data: vec![ModelObject::new(card, app.started)] }))
}

/// `GET /v1/models/{id}`.
pub(super) async fn one(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<ModelObject>, ApiError> {
    let card = app.model.backend()?.card();
    match id == card.id {
        true => Ok(Json(ModelObject::new(card, app.started))),
        false => Err(ApiError::no_such_model(&id, &card.id)),
    }
}

/// `GET /health`: 200 once requests are answered, 503 with the loaded part of the file before.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.model.backend() {
        Ok(_) => Json(json!({"status": "ok"})).into_response(),
        Err(_) => {
            let body = json!({"status": "loading", "progress": app.model.loaded()});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}
