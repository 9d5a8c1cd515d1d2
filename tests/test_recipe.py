"""The fast recipe, completely."""

import pytest
from runs import SHAKESPEARE
from test_data import needs_shakespeare
from test_validation import plain_loss, trained_model


@pytest.mark.slow
@needs_shakespeare
def test_the_fast_recipe_reaches_its_known_loss(zygote, tmp_path):
    """Over the whole validation split."""
    folder = tmp_path / "data" / "shakespeare_char"
    prepare = [f"--data_files={SHAKESPEARE}", f"--out={folder}"]
    zygote.start(prepare, tmp_path, script="data/shakespeare_char/prepare.py").wait()
    args = ["config/train_shakespeare_char_fast.py", "--device=cpu"]
    zygote.start(args, tmp_path).wait(600)
    model = trained_model(tmp_path / "out-shakespeare-char-fast/ckpt_best.pt")
    loss = plain_loss(model, folder / "val.bin", 64)
    assert loss <= 1.9 and model.get_num_params() <= 850_000
