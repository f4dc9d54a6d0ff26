"""`hvdtrain bench`: compare hvdtrain with its peers, and predict how it scales."""
