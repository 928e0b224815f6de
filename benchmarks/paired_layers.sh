# the keeper's so_many floors
