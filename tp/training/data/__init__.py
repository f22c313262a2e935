"""Training data: files to documents to token ids to batches, each of which is a function of its index alone."""

from tp.training.data.cache import default_cache_directory, tokenize_files
from tp.training.data.documents import (
    SEPARATOR,
    Conversation,
    Document,
    PlainText,
    PromptAndCompletion,
    read_documents,
)
from tp.training.data.encoding import DocumentEncoder, EncodedDocument
from tp.training.data.packing import EvaluationBatches, PackedBatches, TrainingBatch
from tp.training.data.split import split_documents
from tp.training.data.tokenized import TokenizedDataset
from tp.training.data.tokenizer import END_TOKEN, train_tokenizer

__all__ = [
    "END_TOKEN",
    "SEPARATOR",
    "Conversation",
    "Document",
    "DocumentEncoder",
    "EncodedDocument",
    "EvaluationBatches",
    "PackedBatches",
    "PlainText",
    "PromptAndCompletion",
    "TokenizedDataset",
    "TrainingBatch",
    "default_cache_directory",
    "read_documents",
    "split_documents",
    "tokenize_files",
    "train_tokenizer",
]
