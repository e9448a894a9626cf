"""What becomes of a trained model: it enters; plain files, or a model on the Hub, leave."""

import logging
from pathlib import Path

from alphastomics.api.notebook import for_notebooks
from alphastomics.api.trained import TrainedVerbs
from alphastomics.diffusion_model.hub_model import publish_model, stated, write_model
from alphastomics.errors import InputError
from alphastomics.io.hub import connect

logger = logging.getLogger(__name__)


@for_notebooks
class SavingVerbs(TrainedVerbs):
    """Verbs that keep a model, and share it."""

    def save(
        self, folder: str | Path, *, overwrite: bool = False, license: str | None = None
    ) -> Path:
        """Write the model as plain files: weights, settings and genes, record, card.

        Parameters
        ----------
        folder
            Folder to write.
        overwrite
            Replace a model that is in the folder.
        license
            Licence for the card, such as mit.
        """
        model, path = self._trained(), Path(folder)
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: is a file; name a folder")
        if path.is_dir() and any(path.iterdir()) and not overwrite:
            raise InputError(f"{path}: is not empty; choose another folder, or overwrite=True")
        write_model(path, model, path.resolve().name, stated(license))
        if self._is_own_folder:
            logger.warning(
                "%s: the training cells are in a temporary folder, which goes with this session; "
                "predict_labels, virtual_section and calibrated impute need them: make the model "
                "with folder=... to keep them",
                path,
            )
        return path

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        license: str | None = None,
    ) -> str:
        """Send the model to the Hugging Face Hub with a card of its real figures.

        Parameters
        ----------
        repo_id
            Name on the Hub, as owner/name; made if there is none.
        private
            Make it private; a public one of that name is refused.
        token
            Access token; None takes the usual Hub login.
        license
            Licence for the card, such as mit; None keeps what the card on the Hub says.

        Returns
        -------
        str
            Address of the model.
        """
        model = self._trained()
        connection = connect(repo_id, token, writing=True)
        return publish_model(connection, model, private=private, licence=license)
